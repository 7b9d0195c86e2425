"""The benchmarks that claims rest on: one command each, whose last line is JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CACHE, QUALITY, TIER, KERNELS, COST, STATELESS = "cache", "quality", "tier", "kernels", "cost", "stateless"


@dataclass(frozen=True)
class Inputs:
    """``text``, ``traces``: folders of the user's, None without. ``quick``: small loads, for a look. ``folder``: where
    sources may leave files.
    """

    folder: Path
    text: Path | None = None
    traces: Path | None = None
    quick: bool = False


@dataclass(frozen=True)
class Source:
    """``arguments``: after ``python -m``. ``{text}``, ``{traces}`` and ``{folder}`` stand for folders; an argument pair
    whose folder is not given is left out. ``quick``: arguments that make it short. ``minutes``: about, on two cores.
    """

    name: str
    arguments: Sequence[str]
    quick: Sequence[str] = ("--quick",)
    minutes: float = 1.0

    def shown(self) -> str:
        """The command as a person would type it."""
        parts = [
            "DIR" if part in {"{text}", "{traces}"} else part.replace("{folder}", "DIR") for part in self.arguments
        ]
        return " ".join(["python", "-m", *(f'"{part}"' if " " in part or ";" in part else part for part in parts)])

    def command(self, inputs: Inputs) -> list[str]:
        """What to run."""
        places = {"{text}": inputs.text, "{traces}": inputs.traces}
        command, skip = [sys.executable, "-m"], False
        for part, following in zip(self.arguments, [*self.arguments[1:], ""], strict=True):
            if skip:
                skip = False
                continue
            if following in places and places[following] is None:
                skip = True
                continue
            found = places.get(part)
            command.append(str(found) if found is not None else part.replace("{folder}", str(inputs.folder)))
        return [*command, *(self.quick if inputs.quick else ())]


def _cache_rows(name: str, rows: str, minutes: float, *folders: str) -> Source:
    return Source(name, ("engine.cache_bench", "--rows", rows, *folders), minutes=minutes)


_TEXT, _TRACES = ("--text", "{text}"), ("--traces", "{traces}")
SOURCES: Final = {
    source.name: source
    for source in (
        _cache_rows(
            CACHE, "bits_per_element,capacity_int4,wasted_pool,throughput_concurrency,alloc_overhead", 2, *_TRACES
        ),
        _cache_rows(QUALITY, "perplexity,selective,eviction_passkey", 9, *_TEXT),
        _cache_rows(TIER, "offload_latency,offload_gain,offload_ceiling", 5, *_TRACES),
        Source(KERNELS, ("kernels.bench", "--dtype", "bfloat16"), minutes=1),
        Source(STATELESS, ("autotune.evidence.stateless",), minutes=1),
        Source(
            COST,
            (
                "autotune", "evaluate", "--policies", "default,predictor", "--workloads",
                "reasoning-bursty@1.2,reasoning-long@1.2,chat-turns@1.2", "--seeds", "3", "--duration", "150",
                "--cost-seeds", "3", "--no-ablation", "--json-line", "--out", "{folder}/evaluate",
            ),
            quick=("--duration", "60", "--seeds", "1", "--cost-seeds", "1"),
            minutes=10,
        ),
    )
}  # fmt: skip
