"""What an engine is started with. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ConfigurationError, EngineError
from engine.models.folder import check_folder
from engine.paths import default_control_socket
from engine.prefix_pins import DEFAULT_SHARE
from engine.recording import DEFAULT_MAX_BYTES
from engine.tunables import TunableValues, default_values, parse_change
from kernels.layout import NATIVE_TILE_TOKENS

DEFAULT_PORT = 8000
_MOST_THREADS = 1024  # OpenMP would start any number, until the machine can take no more
_LONGEST_GRACE_S = 86_400


@dataclass(frozen=True)
class EngineOptions:
    """Everything that is fixed while an engine runs. ``None`` leaves the choice to the engine.

    ``tunables``: values at start that differ from the defaults. ``control_uids``: users besides the engine's own
    and root who may use the control socket; naming any makes the socket 0660. ``grace_s``: how long running
    requests may go on after a signal; ``stall_s``: how long a step may take before it counts as a freeze.
    ``threads``: processor threads of matrix products and attention. ``protect_layers``: so many first layers keep
    their KV native. ``host_pool_bytes``: host memory for KV, 0 for none; ``host_link_bytes_per_s``: rate of the
    emulated link to it, where the device is no GPU (None: a twentieth of the memory's bandwidth).
    ``quality_table``: refuse formats that cost this model more than ``quality_budget_pct`` of perplexity.
    ``record``: file that gets arrival, lengths and salted prefix hashes of every
    request, see :mod:`engine.recording`.
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    device: str = "auto"
    dtype: str = "auto"
    served_model_name: str | None = None
    kv_pool_bytes: int | None = None
    host_pool_bytes: int = 0
    host_link_bytes_per_s: float | None = None
    control: Path | None = None
    control_uids: tuple[int, ...] = ()
    tunables: TunableValues = field(default_factory=dict)
    max_model_len: int | None = None
    max_waiting: int = 256
    recent_tokens: int = 64
    protect_layers: int = 0
    sinks: int = 16
    watermark: float = 0.01
    prefix_pin_share: float = DEFAULT_SHARE
    recode_budget_tokens: int | None = None
    idle_recode_tokens: int = 2048
    seed: int | None = None
    max_body_bytes: int = 8 << 20
    grace_s: float = 1.0
    stall_s: float = 60.0
    threads: int | None = None
    quality_table: Path | None = None
    quality_budget_pct: float = 0.5
    record: Path | None = None
    record_max_bytes: int = DEFAULT_MAX_BYTES

    @property
    def control_path(self) -> Path:
        return self.control or default_control_socket()

    def initial_values(self) -> TunableValues:
        """Every tunable at its value at start. Raises EngineError for an unknown knob or value."""
        try:
            return default_values() | {name: parse_change(name, value) for name, value in self.tunables.items()}
        except ValueError as error:
            raise EngineError(str(error)) from error


def _check_numbers(options: EngineOptions) -> None:
    """Raises EngineError for a number that no engine could work with. What depends on the model is checked later."""
    limits: tuple[tuple[str, float | None, int, float], ...] = (
        ("--threads", options.threads, 1, _MOST_THREADS),
        ("--max-waiting", options.max_waiting, 1, math.inf),
        ("--protect-layers", options.protect_layers, 0, math.inf),
        ("--recode-budget", options.recode_budget_tokens, 0, math.inf),
        ("--host-link-bytes-per-s", options.host_link_bytes_per_s, 1, math.inf),
        ("--prefix-pin-share", options.prefix_pin_share, 0, 1),
        ("--grace", options.grace_s, 0, _LONGEST_GRACE_S),
        ("--stall", options.stall_s, 1, _LONGEST_GRACE_S),
        ("--quality-budget", options.quality_budget_pct, 0, math.inf),
    )
    for name, value, least, most in limits:
        # Not a number is outside, too.
        if value is not None and not least <= value <= most:
            allowed = f"at least {least}" if most == math.inf else f"{least} to {most:g}"
            shown = f"{value:g}" if isinstance(value, float) else f"{value!s:.40}"  # a whole number has no end
            raise EngineError(f"{name} {shown}: give {allowed}")
    if options.recent_tokens < 0 or options.recent_tokens % NATIVE_TILE_TOKENS:
        raise EngineError(f"--recent-tokens {options.recent_tokens}: give a multiple of {NATIVE_TILE_TOKENS}, or 0")


def check(options: EngineOptions) -> None:
    """Raises ConfigurationError for what can be seen to be wrong without loading anything."""
    try:
        options.initial_values()
        _check_numbers(options)
        check_folder(options.model)
        if options.quality_table is not None:
            from engine.quality.table import read_table  # noqa: PLC0415 - pydantic, which few starts need so early

            read_table(options.quality_table)
    except EngineError as error:
        raise ConfigurationError(str(error)) from error
