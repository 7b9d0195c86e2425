"""Asks one Prometheus everything that the rows need: five queries, however many engines there are."""

from __future__ import annotations

from typing import Final

from autotune.fleet.names import NAMES
from autotune.fleet.prometheus import Prometheus
from autotune.fleet.rows import DONE, Row, rows_of

LOOK_BACK_S: Final = 3600.0


def read_fleet(prometheus: Prometheus, look_back_s: float = LOOK_BACK_S) -> list[Row]:
    """The rows as of now. Raises PrometheusError."""
    now_s = prometheus.now_s()
    return rows_of(
        prometheus.instant(f'{{__name__=~"{"|".join(NAMES)}"}}'),
        prometheus.instant("up"),
        prometheus.instant(f"last_over_time(autotune_ticks_total[{look_back_s:.0f}s])"),
        # With the ticks, so that it can be told when a counter began later than its daemon.
        prometheus.samples(
            '{__name__=~"autotune_decisions_total|autotune_ticks_total",'
            f'verdict=~"{"|".join(DONE)}|"}}[{look_back_s:.0f}s]'
        ),
        now_s,
    )
