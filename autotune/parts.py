"""What a daemon is made of: the injected parts and the settings that a reload may replace."""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.actuator import Actuator
from autotune.adapters.desk import RestartDesk
from autotune.collector import Collector
from autotune.dashboard.plots import PlotHistory
from autotune.decisions import DecisionLog
from autotune.deliberation import Minds
from autotune.journal import Journal
from autotune.metrics import DaemonMetrics
from autotune.ticker import Waiter
from engine.clock import Clock
from envs.live import LiveEngine


@dataclass
class Settings:
    """Plain values out of the configuration; durations in seconds."""

    mode: str
    poll_s: float
    tick_s: float
    window_s: float
    long_s: float
    stale_after_s: float
    timeout_s: float
    ttft_target_s: float
    tbt_target_s: float


@dataclass
class Parts:
    """What the loop drives. ``env`` and ``minds`` may be replaced between two ticks. ``restarts``: beside an engine
    that takes its settings at its start only.
    """

    clock: Clock
    waiter: Waiter
    actuator: Actuator
    collector: Collector
    env: LiveEngine
    minds: Minds
    journal: Journal
    decisions: DecisionLog
    metrics: DaemonMetrics
    restarts: RestartDesk | None = None
    plots: PlotHistory = field(default_factory=PlotHistory)
