"""The series that the fleet is read from. What other engines call them is their adapters' table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from autotune.adapters.find import KINDS
from autotune.adapters.names import MetricNames

_OURS: Final = MetricNames(
    prefix="autotune_engine_",
    gauges={
        "load": ("autotune_engine_load",),
        "kv_usage": ("autotune_engine_kv_cache_usage",),
        "running": ("autotune_engine_num_requests_running",),
        "waiting": ("autotune_engine_num_requests_waiting",),
    },
)


@dataclass(frozen=True)
class EngineGauge:
    """What a series of an engine's own page tells: ``attribute`` of a row. ``engine`` and ``only``: as in
    :class:`autotune.adapters.names.MetricNames`.
    """

    attribute: str
    engine: str
    only: Mapping[str, str]


def _gauges() -> Iterator[tuple[str, EngineGauge]]:
    for names in (_OURS, *(kind.names for kind in KINDS.values())):
        for attribute, known in names.gauges.items():
            yield from ((name, EngineGauge(attribute, names.engine, names.only)) for name in known)


ENGINE_GAUGES: Final[Mapping[str, EngineGauge]] = dict(_gauges())
"""By name; of several names of one figure the newest comes first."""
FORMAT_KNOBS: Final = ("kv_format", *dict.fromkeys(knob for kind in KINDS.values() for knob in kind.kv_knobs))
"""The knobs of every kind of engine that say how KV is stored."""
DAEMON_GAUGES: Final[Mapping[str, str]] = {
    "autotune_load": "load",
    "autotune_kv_cache_usage": "kv_usage",
    "autotune_num_requests_running": "running",
    "autotune_num_requests_waiting": "waiting",
    "autotune_last_change_age_seconds": "last_change_age_s",
}
_LABELLED: Final = (
    "autotune_engine_health",
    "autotune_mode",
    "autotune_policy",
    "autotune_tunable",
    "autotune_kv_resident_bytes",
    "autotune_window_ttft_seconds",
    "autotune_window_tbt_seconds",
    "autotune_target_seconds",
    "autotune_override",
)
NAMES: Final = (*DAEMON_GAUGES, *_LABELLED, *ENGINE_GAUGES)
