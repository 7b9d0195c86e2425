"""The configuration's sections about the engine itself: which one, and whether and how it may be restarted."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from autotune.schema_base import RESTART, KeyedError, Section


class EngineSection(Section):
    """The engine that the daemon tunes, or, of another make, watches."""

    kind: Literal["autotune", "vllm", "sglang", "llamacpp"] = Field(
        default="autotune",
        description="autotune: ours, by its control socket. The others are watched by their metrics page and change at "
        "a restart only.",
        json_schema_extra=RESTART,
    )
    url: str | None = Field(
        default=None,
        description="Address of an engine of another make, such as http://127.0.0.1:8000.",
        json_schema_extra=RESTART,
    )
    label: str | None = Field(
        default=None,
        description="Which one, where several engines share a page (data parallelism).",
        json_schema_extra=RESTART,
    )
    control: Path | None = Field(
        default=None, description="Control socket; the engine's default one if absent.", json_schema_extra=RESTART
    )
    poll_s: float = Field(default=0.5, ge=0.02, le=60, description="Seconds between two readings of the engine.")
    timeout_s: float = Field(
        default=2, gt=0, le=60, description="Patience for one call to the engine.", json_schema_extra=RESTART
    )
    stale_after_s: float = Field(default=5, gt=0, le=600, description="A reading older than this decides nothing.")

    @model_validator(mode="after")
    def _has_url(self) -> Self:
        if self.kind != "autotune" and self.url is None:
            raise KeyedError({"url": f"where the {self.kind} engine answers must be named"})
        if self.kind == "autotune" and self.url is not None:
            raise KeyedError({"url": "is for engines of another make; name its kind, or leave it out"})
        return self


class RestartSection(Section):
    """Restarts of an engine of another make, which takes its KV settings at its start only (docs/adapters.md)."""

    allowed: bool = Field(
        default=False,
        description="Your permission. Without it, and in any mode but active, there is advice only: nothing is "
        "restarted and no file written.",
    )
    file: Path | None = Field(
        default=None,
        description="The settings for the next start, for the engine's unit to read. The daemon's own; its folder must "
        "be writable.",
        json_schema_extra=RESTART,
    )
    form: Literal["environment", "drop_in"] = Field(
        default="environment",
        description="Of the file: for EnvironmentFile=, or a drop-in of the unit.",
        json_schema_extra=RESTART,
    )
    commands: tuple[tuple[str, ...], ...] = Field(
        default=(),
        description="What restarts the engine, one after the other, without a shell, e.g. "
        "[[systemctl, restart, vllm.service]].",
        json_schema_extra=RESTART,
    )
    drain: Literal["idle", "pause"] = Field(
        default="idle",
        description="idle waits for a moment without requests; pause has the engine finish what it has and hold back "
        "what comes, which a restart then loses.",
        json_schema_extra=RESTART,
    )
    drain_s: float = Field(
        default=300,
        gt=0,
        le=86400,
        description="If it is not drained by then, nothing is restarted.",
        json_schema_extra=RESTART,
    )
    ready_s: float = Field(
        default=600, gt=0, le=86400, description="Then the change is taken back.", json_schema_extra=RESTART
    )
    min_interval_s: float = Field(default=3600, ge=60, le=31_536_000, description="Between two restarts, at least.")
    takes_s: float = Field(
        default=60, gt=0, le=86400, description="Time without service, as a guess until a restart has been seen."
    )
    payback_s: float = Field(
        default=3600, gt=0, le=31_536_000, description="Within which it must save what it costs, under the same load."
    )
    watch_s: float = Field(default=600, ge=60, le=86400, description="How much of the past is weighed.")

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if self.allowed and self.file is None:
            raise KeyedError({"file": "a restart that is allowed needs a file to write"})
        if self.allowed and not self.commands:
            raise KeyedError({"commands": "a restart that is allowed needs a command"})
        if any(not command or not all(command) for command in self.commands):
            raise KeyedError({"commands": "every command needs its words, none of them empty"})
        return self
