"""What the daemon tells Prometheus: resource, performance and business figures of the engine, and its own decisions.

Every label set is bounded: knobs and values come from the declarations, verdicts from the guard, writers from a fixed
list; beyond a limit decisions count as "other". All is at most 300 series. Unknown is NaN or absent, never 0.
"""

from __future__ import annotations

import math
from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector as RegistryCollector

from autotune.collector import CollectorCounters, Health
from autotune.housekeeping import OUTCOMES
from autotune.journal import JournalCounters
from engine.stats import HISTOGRAM_BUCKETS, EngineStats, Histogram
from engine.tunables import TUNABLES, Tunable
from envs.window import StatsWindow, ratio
from policies.choice import Choice
from policies.judgement import Outcome

MODES: Final = ("active", "advise", "off")
WRITERS: Final = ("autotune", "operator", "startup", "other")
_MOST_VALUES: Final = 32  # of a knob with more, all are "other"
# So many kinds of decisions are told apart; of further ones only knob, writer and verdict, and in the end nothing.
_MAX_DECISION_KINDS: Final = 56
_MAX_DECISION_SERIES: Final = 70
_PERCENTILES: Final = (50, 95, 99)
# Exact bounds of the engine's own logarithmic buckets. Of what has a target every sixth (77 % apart): TTFT from 1.6 ms
# to 14 min, gaps between tokens from 0.5 ms to 26 s. Of the rest every twelfth, from 5 ms and 1.6 ms to 15 min.
_TTFT_STEPS: Final = range(29, 168, 6)
_GAP_STEPS: Final = range(17, 133, 6)
_REQUEST_STEPS: Final = range(41, HISTOGRAM_BUCKETS - 1, 12)
_QUEUE_STEPS: Final = range(29, HISTOGRAM_BUCKETS - 1, 12)


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
        self._decision_labels: set[tuple[str, ...]] = set()
        self.decisions = Counter(
            "autotune_decisions",
            "Proposals, by what was to change, why, who wanted it and what became of it.",
            ["knob", "to", "scenario", "writer", "verdict"],
            registry=registry,
        )
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
        """Count one proposal; labels outside the declared ones become "other", as do those of a kind too many."""
        tunable = self.tunables.get(knob)
        is_declared = tunable is not None and to in tunable.values and len(tunable.values) <= _MOST_VALUES
        value = str(to) if is_declared else "other"
        known, who = "other" if tunable is None else knob, writer_class(writer)
        labels = self._bounded((known, value, scenario, who, verdict), (known, "other", "other", who, verdict))
        self.decisions.labels(*labels).inc()

    def count_job(self, outcome: str, times: int) -> None:
        """Count runs of background jobs; ``outcome``: of :data:`autotune.housekeeping.OUTCOMES`."""
        self.jobs.labels(outcome).inc(times)

    def _bounded(self, whole: tuple[str, ...], folded: tuple[str, ...]) -> tuple[str, ...]:
        seen = self._decision_labels
        for labels, most in ((whole, _MAX_DECISION_KINDS), (folded, _MAX_DECISION_SERIES)):
            if labels in seen or len(seen) < most:
                seen.add(labels)
                return labels
        return ("other",) * len(whole)


def writer_class(writer: str) -> str:
    """The bounded label of a writer's name: ``operator:anna`` is ``operator``."""
    kind = writer.partition(":")[0]
    return kind if kind in WRITERS else "other"


class _SnapshotCollector(RegistryCollector):
    def __init__(self, metrics: DaemonMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []  # families depend on what is known; names do not clash with the counters above

    def collect(self) -> Iterator[Metric]:
        snapshot, tunables = self._metrics.snapshot, self._metrics.tunables
        yield from _daemon(snapshot, tunables)
        if snapshot.reading is not None:
            yield from _resource(snapshot.reading, snapshot.window, tunables)
            yield from _performance(snapshot.reading, snapshot.window)
            yield from _business(snapshot.reading, snapshot)


def _daemon(snapshot: Snapshot, tunables: Mapping[str, Tunable]) -> Iterator[Metric]:
    yield _states(
        "autotune_engine_health",
        "Which state the engine is in, as the daemon sees it.",
        "state",
        Health,
        snapshot.health,
    )
    yield _states("autotune_mode", "Which mode the daemon is in.", "mode", MODES, snapshot.mode)
    yield from _policy(snapshot)
    budget = "Mean relative loss per token that the guard keeps; unknown where none is kept."
    yield _gauge("autotune_quality_budget_ratio", budget, snapshot.quality_budget)
    lost = "Mean relative loss per token of late, by the guard's books; unknown before any."
    yield _gauge("autotune_quality_lost_ratio", lost, snapshot.lost_per_token)
    yield _counter("autotune_ticks", "Control ticks.", snapshot.ticks)
    yield _counter("autotune_missed_ticks", "Control ticks that a stall skipped.", snapshot.missed_ticks)
    yield _counter("autotune_engine_polls", "Readings asked of the engine.", snapshot.polls.polls)
    yield _counter("autotune_engine_poll_failures", "Readings that got no answer.", snapshot.polls.failed_polls)
    yield _counter("autotune_engine_restarts", "New engine instances seen.", snapshot.polls.restarts)
    violations = snapshot.polls.invariant_violations
    yield _counter("autotune_metrics_invariant_violations", "Readings refused because they cannot be true.", violations)
    yield _counter("autotune_journal_postponed_writes", "Journal writes that had to wait.", snapshot.journal.postponed)
    yield _counter("autotune_journal_dropped_rows", "Journal rows lost for want of room.", snapshot.journal.dropped)
    yield _counter("autotune_journal_pruned_rows", "Rows deleted to stay in bounds.", snapshot.journal.pruned)
    yield _counter("autotune_journal_moved_aside", "Damaged journals replaced.", snapshot.journal.moved_aside)
    yield _gauge("autotune_last_change_age_seconds", "Time since the daemon last wrote.", snapshot.seconds_since_change)
    overrides = GaugeMetricFamily("autotune_override", "1 where somebody else owns the knob.", labels=["knob"])
    for knob in tunables:
        overrides.add_metric([knob], float(knob in snapshot.overridden))
    yield overrides
    targets = GaugeMetricFamily("autotune_target_seconds", "Latency targets.", labels=["metric"])
    targets.add_metric(["ttft"], snapshot.ttft_target_s)
    targets.add_metric(["tbt"], snapshot.tbt_target_s)
    yield targets


def _policy(snapshot: Snapshot) -> Iterator[Metric]:
    """Who decides. Names are those of the one policy in force and of what is bundled: few."""
    policy = GaugeMetricFamily("autotune_policy", "1 for the policy that decides.", labels=["policy"])
    policy.add_metric([snapshot.policy], 1)
    yield policy
    refused = "1 while rules decide in place of a policy that could not be used at the start."
    yield _gauge("autotune_policy_refused", refused, snapshot.is_policy_refused)
    bundled = GaugeMetricFamily(
        "autotune_bundled_policy",
        "1 for what policy: {use: auto} made of each bundled policy: taken, or the kind of reason why not.",
        labels=["policy", "outcome"],
    )
    choice = snapshot.choice
    if choice is not None and choice.bundled is not None:
        bundled.add_metric([choice.bundled, "taken"], 1)
    for other in () if choice is None else choice.refused:
        bundled.add_metric([other.name, other.reason], 1)
    yield bundled


def _resource(reading: EngineStats, window: StatsWindow, tunables: Mapping[str, Tunable]) -> Iterator[Metric]:
    gauges, counters = reading.gauges, reading.counters
    yield _gauge("autotune_kv_cache_usage", "Share of the KV pool in use, 0 to 1.", gauges.kv_usage)
    pool = GaugeMetricFamily("autotune_kv_cache_bytes", "KV pool: its size, used, reusable prefix.", labels=["part"])
    for part, value in (
        ("pool", gauges.kv_pool_bytes),
        ("used", gauges.kv_used_bytes),
        ("cached", gauges.kv_cached_bytes),
    ):
        pool.add_metric([part], _known(value))
    yield pool
    labels = ["kv_format", "block_size"]
    stored = GaugeMetricFamily("autotune_kv_resident_bytes", "KV bytes by format and block size.", labels=labels)
    tokens = GaugeMetricFamily("autotune_kv_resident_tokens", "KV tokens by format.", labels=["kv_format"])
    bytes_of: Counts[tuple[str, str]] = Counts()
    tokens_of: Counts[str] = Counts()
    for row in gauges.resident or ():  # summed, since undeclared classes share the label "other"
        known = (_declared(TUNABLES["kv_format"], row.kv_format), _declared(TUNABLES["block_size"], row.block_size))
        names = ("other", "other") if "other" in known else known
        bytes_of[names] += row.bytes
        tokens_of[names[0]] += row.tokens
    for names, total in bytes_of.items():
        stored.add_metric(names, total)
    for name, total in tokens_of.items():
        tokens.add_metric([name], total)
    yield stored
    yield tokens
    yield _gauge("autotune_kv_converged_ratio", "Share of KV already as the knobs say.", gauges.converged_fraction)
    below = gauges.held_below_format_bytes
    yield _gauge("autotune_kv_held_below_format_bytes", "KV stored in a lossier format than asked for.", below)
    memory = GaugeMetricFamily("autotune_engine_memory_bytes", "The engine's memory.", labels=["kind"])
    memory.add_metric(["rss"], _known(gauges.memory_rss_bytes))
    memory.add_metric(["device"], _known(gauges.device_memory_bytes))
    yield memory
    yield _counter("autotune_kv_read_bytes", "KV bytes read by attention.", counters.kv_bytes_read)
    yield _counter("autotune_kv_written_bytes", "KV bytes written.", counters.kv_bytes_written)
    moved = _known(window.rate("kv_bytes_read")) + _known(window.rate("kv_bytes_written"))
    yield _gauge("autotune_kv_bandwidth_bytes_per_second", "KV bytes moved per second of the window.", moved)
    peak = gauges.memory_bandwidth_bytes_per_s
    yield _gauge(
        "autotune_memory_bandwidth_ratio", "That, of the device's measured peak.", moved / peak if peak else math.nan
    )
    settings = GaugeMetricFamily("autotune_tunable", "1 for the value in force.", labels=["knob", "value"])
    for knob, setting in reading.effective.items():
        if knob in tunables:
            settings.add_metric([knob, _declared(tunables[knob], setting)], 1)
    yield settings


def _performance(reading: EngineStats, window: StatsWindow) -> Iterator[Metric]:
    gauges, counters = reading.gauges, reading.counters
    histograms = (
        (
            "autotune_time_to_first_token_seconds",
            "Arrival to first token, queueing included.",
            reading.ttft,
            _TTFT_STEPS,
        ),
        ("autotune_inter_token_latency_seconds", "Every gap between two tokens.", reading.itl, _GAP_STEPS),
        ("autotune_e2e_request_latency_seconds", "Arrival to last token.", reading.e2e, _REQUEST_STEPS),
        ("autotune_request_queue_time_seconds", "Arrival to first scheduled.", reading.queue, _QUEUE_STEPS),
    )
    for name, text, histogram, steps in histograms:
        yield _histogram(name, text, histogram, steps)
    for name, text, attribute in (
        ("autotune_window_ttft_seconds", "Percentiles of TTFT over the window.", "ttft"),
        ("autotune_window_tbt_seconds", "Percentiles of the gap between tokens over the window.", "itl"),
    ):
        quantiles = GaugeMetricFamily(name, text, labels=["percentile"])
        for percentile in _PERCENTILES:
            quantiles.add_metric([str(percentile)], _known(window.quantile(attribute, percentile / 100)))
        yield quantiles
    yield _gauge("autotune_num_requests_running", "Sequences running.", gauges.running)
    yield _gauge("autotune_num_requests_waiting", "Requests waiting.", gauges.waiting)
    together = _known(gauges.running) + _known(gauges.waiting)
    yield _gauge("autotune_concurrent_sessions", "Running and waiting together.", together)
    load = reading.load if gauges.kv_usage is not None and reading.max_num_seqs is not None else None
    yield _gauge("autotune_load", "max(KV usage, concurrency), clipped to 1.", load)
    yield _counter("autotune_prefill_tokens", "Prompt tokens computed.", counters.prefill_tokens_computed)
    yield _counter("autotune_decode_tokens", "Tokens decoded.", counters.decode_tokens_computed)
    rates = GaugeMetricFamily("autotune_tokens_per_second", "Over the window.", labels=["phase"])
    rates.add_metric(["prefill"], _known(window.rate("prefill_tokens_computed")))
    rates.add_metric(["decode"], _known(window.rate("decode_tokens_computed")))
    yield rates
    times = CounterMetricFamily("autotune_phase_time_seconds", "Time spent, by phase.", labels=["phase"])
    shares = GaugeMetricFamily("autotune_phase_time_ratio", "Share of the window's time, by phase.", labels=["phase"])
    for phase in ("step", "prefill", "decode", "recode", "recompute"):
        spent_ns = getattr(counters, f"{phase}_time_ns")
        if spent_ns is not None:
            times.add_metric([phase], spent_ns / 1e9)
        shares.add_metric([phase], _known(window.rate(f"{phase}_time_ns", 1e-9)))
    yield times
    yield shares
    yield _counter("autotune_num_preemptions", "Sequences preempted.", counters.preemptions)
    yield _counter("autotune_recomputed_tokens", "Tokens computed again after preemption.", counters.recomputed_tokens)
    yield _counter("autotune_recoded_tokens", "Tokens recoded to another class.", counters.recoded_tokens)
    yield _counter("autotune_evicted_tokens", "Tokens dropped from running sequences.", counters.evicted_tokens)
    yield _counter("autotune_prefix_cache_queries", "Prompt tokens looked up.", counters.prefix_cache_queries)
    yield _counter("autotune_prefix_cache_hits", "Prompt tokens found.", counters.prefix_cache_hits)
    hits = ratio(window.count("prefix_cache_hits"), window.count("prefix_cache_queries"))
    yield _gauge("autotune_prefix_cache_hit_ratio", "Over the window.", _known(hits))


def _business(reading: EngineStats, snapshot: Snapshot) -> Iterator[Metric]:
    counters, window = reading.counters, snapshot.window
    requests = CounterMetricFamily("autotune_requests", "Requests by what became of them.", labels=["outcome"])
    for outcome in ("offered", "admitted", "completed", "rejected", "aborted", "failed"):
        number = getattr(counters, f"requests_{outcome}")
        if number is not None:
            requests.add_metric([outcome], number)
    yield requests
    yield _gauge(
        "autotune_request_success_ratio", "Completed of completed, failed and rejected.", _known(success_ratio(window))
    )
    apdex_scores = GaugeMetricFamily("autotune_apdex_score", "Apdex over the window, 0 to 1.", labels=["metric"])
    inside = GaugeMetricFamily("autotune_within_target_ratio", "Share inside the target.", labels=["metric"])
    for metric, attribute, target in (
        ("ttft", "ttft", snapshot.ttft_target_s),
        ("tbt", "itl", snapshot.tbt_target_s),
    ):
        apdex_scores.add_metric([metric], _known(apdex(window, attribute, target)))
        inside.add_metric([metric], _known(window.share_within(attribute, target)))
    yield apdex_scores
    yield inside
    yield _counter("autotune_user_feedback", "Scores that users gave.", counters.feedback_count)
    score = ratio(window.count("feedback_sum"), window.count("feedback_count"))
    yield _gauge("autotune_user_score", "Mean of the users' scores in the window; unknown when none.", _known(score))


def success_ratio(window: StatsWindow) -> float | None:
    """Completed requests of those that ended otherwise than by their client's own wish; None when none ended."""
    ended = [window.count(f"requests_{outcome}") for outcome in ("completed", "failed", "rejected")]
    known = [count for count in ended if count is not None]
    return ratio(ended[0], sum(known)) if len(known) == len(ended) else None


def apdex(window: StatsWindow, histogram: str, target_s: float) -> float | None:
    """Apdex (apdex.org): satisfied up to the target, half a point up to four times it; None without values."""
    satisfied, tolerated = (window.share_within(histogram, factor * target_s) for factor in (1, 4))
    return None if satisfied is None or tolerated is None else (satisfied + tolerated) / 2


def _histogram(name: str, text: str, values: Histogram | None, steps: range) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text)
    if values is None:
        return family
    buckets, seen, start = [], 0, 0
    for index in steps:
        seen += sum(values.counts[start : index + 1])
        start = index + 1
        buckets.append((f"{values.bound_s(index):.6g}", float(seen)))
    buckets.append(("+Inf", float(values.count)))
    family.add_metric([], buckets, values.sum_s)
    return family


def _states(
    name: str, text: str, label: str, states: Mapping[str, str] | tuple[str, ...] | type[Health], current: str
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for state in states:
        family.add_metric([str(state)], float(state == current))
    return family


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=_known(value))


def _counter(name: str, text: str, value: float | None) -> CounterMetricFamily:
    """Absent where unknown: a counter that is no number would spoil every rate."""
    return CounterMetricFamily(name, text, value=value)


def _declared(tunable: Tunable, value: object) -> str:
    return str(value) if value in tunable.values else "other"


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)
