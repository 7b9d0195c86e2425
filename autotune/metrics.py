"""What the daemon tells Prometheus: the engine's figures, its own decisions, and how it fares itself.

Every label set is bounded. All is at most 300 series. Unknown is NaN or absent, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector as RegistryCollector

from autotune.collector import CollectorCounters, Health
from autotune.housekeeping import OUTCOMES
from autotune.journal import JournalCounters
from autotune.metrics_decisions import DecisionCounter
from autotune.metrics_engine import engine_families
from autotune.metrics_families import counter, gauge, states
from engine.stats import EngineStats
from engine.tunables import TUNABLES, Tunable
from envs.window import StatsWindow
from policies.choice import Choice
from policies.judgement import Outcome

MODES: Final = ("active", "advise", "off")


@dataclass
class Snapshot:
    """What one scrape shows; the loop replaces it whole at every tick, so that a scrape never sees half of one."""

    health: Health = Health.STARTING
    mode: str = "off"
    policy: str = ""
    choice: Choice | None = None
    is_policy_refused: bool = False
    quality_budget: float = math.nan
    lost_per_token: float = math.nan
    reading: EngineStats | None = None
    window: StatsWindow = field(default_factory=lambda: StatsWindow(None, None))
    ttft_target_s: float = math.nan
    tbt_target_s: float = math.nan
    overridden: frozenset[str] = frozenset()
    seconds_since_change: float = math.nan
    ticks: int = 0
    missed_ticks: int = 0
    polls: CollectorCounters = field(default_factory=CollectorCounters)
    journal: JournalCounters = field(default_factory=JournalCounters)


class DaemonMetrics:
    """Registers everything in ``registry``; the loop counts through the methods and sets :attr:`snapshot`."""

    def __init__(self, registry: CollectorRegistry, tunables: Mapping[str, Tunable] = TUNABLES) -> None:
        """``tunables``: the knobs of the engine that is watched."""
        self.snapshot, self.tunables = Snapshot(), tunables
        self._decisions = DecisionCounter(registry, tunables)
        self.policy_errors = Counter(
            "autotune_policy_errors", "Ticks at which the policy failed and nothing was done.", registry=registry
        )
        self.tick_errors = Counter("autotune_tick_errors", "Ticks that failed as a whole.", registry=registry)
        self.judged_changes = Counter(
            "autotune_judged_changes",
            "Changes by what they did: met, short, missed, unclear.",
            ["outcome"],
            registry=registry,
        )
        for judged in Outcome:
            self.judged_changes.labels(str(judged))
        self.reloads = Counter("autotune_reloads", "Configuration reloads.", ["outcome"], registry=registry)
        for outcome in ("applied", "rejected"):
            self.reloads.labels(outcome)
        self.jobs = Counter(
            "autotune_housekeeping_runs",
            "Runs of background jobs: done, failed, or missed and made up for by the next one.",
            ["outcome"],
            registry=registry,
        )
        for outcome in OUTCOMES:
            self.jobs.labels(outcome)
        registry.register(_SnapshotCollector(self))
        ProcessCollector(registry=registry)

    def count_decision(self, knob: str, to: object, scenario: str, writer: str, verdict: str) -> None:
        """Count one proposal; see :meth:`autotune.metrics_decisions.DecisionCounter.count`."""
        self._decisions.count(knob, to, scenario, writer, verdict)

    def count_job(self, outcome: str, times: int) -> None:
        """Count runs of background jobs; ``outcome``: of :data:`autotune.housekeeping.OUTCOMES`."""
        self.jobs.labels(outcome).inc(times)


class _SnapshotCollector(RegistryCollector):
    def __init__(self, metrics: DaemonMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []  # families depend on what is known; names do not clash with the counters above

    def collect(self) -> Iterator[Metric]:
        snapshot, tunables = self._metrics.snapshot, self._metrics.tunables
        yield from _daemon(snapshot, tunables)
        if snapshot.reading is not None:
            targets = snapshot.ttft_target_s, snapshot.tbt_target_s
            yield from engine_families(snapshot.reading, snapshot.window, *targets, tunables)


def _daemon(snapshot: Snapshot, tunables: Mapping[str, Tunable]) -> Iterator[Metric]:
    yield states(
        "autotune_engine_health",
        "Which state the engine is in, as the daemon sees it.",
        "state",
        Health,
        snapshot.health,
    )
    yield states("autotune_mode", "Which mode the daemon is in.", "mode", MODES, snapshot.mode)
    yield from _policy(snapshot)
    budget = "Mean relative loss per token that the guard keeps; unknown where none is kept."
    yield gauge("autotune_quality_budget_ratio", budget, snapshot.quality_budget)
    lost = "Mean relative loss per token of late, by the guard's books; unknown before any."
    yield gauge("autotune_quality_lost_ratio", lost, snapshot.lost_per_token)
    yield counter("autotune_ticks", "Control ticks.", snapshot.ticks)
    yield counter("autotune_missed_ticks", "Control ticks that a stall skipped.", snapshot.missed_ticks)
    yield counter("autotune_engine_polls", "Readings asked of the engine.", snapshot.polls.polls)
    yield counter("autotune_engine_poll_failures", "Readings that got no answer.", snapshot.polls.failed_polls)
    yield counter("autotune_engine_restarts", "New engine instances seen.", snapshot.polls.restarts)
    violations = snapshot.polls.invariant_violations
    yield counter("autotune_metrics_invariant_violations", "Readings refused because they cannot be true.", violations)
    yield counter("autotune_journal_postponed_writes", "Journal writes that had to wait.", snapshot.journal.postponed)
    yield counter("autotune_journal_dropped_rows", "Journal rows lost for want of room.", snapshot.journal.dropped)
    yield counter("autotune_journal_pruned_rows", "Rows deleted to stay in bounds.", snapshot.journal.pruned)
    yield counter("autotune_journal_moved_aside", "Damaged journals replaced.", snapshot.journal.moved_aside)
    yield gauge("autotune_last_change_age_seconds", "Time since the daemon last wrote.", snapshot.seconds_since_change)
    overrides = GaugeMetricFamily("autotune_override", "1 where somebody else owns the knob.", labels=["knob"])
    for knob in tunables:
        overrides.add_metric([knob], float(knob in snapshot.overridden))
    yield overrides
    targets = GaugeMetricFamily("autotune_target_seconds", "Latency targets.", labels=["metric"])
    targets.add_metric(["ttft"], snapshot.ttft_target_s)
    targets.add_metric(["tbt"], snapshot.tbt_target_s)
    yield targets


def _policy(snapshot: Snapshot) -> Iterator[Metric]:
    """Who decides. Names are those of the one policy in force and of what ``auto`` looked at: few, and bounded by
    :mod:`policies.auto`.
    """
    policy = GaugeMetricFamily("autotune_policy", "1 for the policy that decides.", labels=["policy"])
    policy.add_metric([snapshot.policy], 1)
    yield policy
    refused = "1 while rules decide in place of a policy that could not be used at the start."
    yield gauge("autotune_policy_refused", refused, snapshot.is_policy_refused)
    bundled = GaugeMetricFamily(
        "autotune_bundled_policy",
        "1 for what policy: {use: auto} made of rules, predictor and each bundled policy: taken, or why not.",
        labels=["policy", "outcome"],
    )
    for outcome in () if snapshot.choice is None else snapshot.choice.outcomes():
        bundled.add_metric(outcome, 1)
    yield bundled
