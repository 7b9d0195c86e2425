"""How the figures of :mod:`envs.features` are computed from windows. Stdlib only.

Quantities that depend on the format in force would chase their own tail in a rule (quantising lowers usage, low usage
asks for native again), so ``demand`` says what everything in hand would need *if* it were stored in a given format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine.tunables import TUNABLES
from envs.window import StatsWindow, amount, ratio

FORMAT_NAMES: Final = tuple(str(value) for value in TUNABLES["kv_format"].values)

# Bytes of a token against native, head_dim 64 under bf16 (the least saving), used until the engine tells its own.
_ASSUMED_SHARE: Final = {"native": 1.0, "int8": 0.55, "k8v4": 0.43, "int4": 0.3}

MOST_TARGET_S: Final = 1e6  # beyond it nobody waits


@dataclass(frozen=True)
class Targets:
    """Latency targets in seconds, and the quantile whose tail is held against them."""

    ttft_s: float = 1.0
    tbt_s: float = 0.1
    quantile: float = 0.95

    def __post_init__(self) -> None:
        if not (0 < self.ttft_s <= MOST_TARGET_S and 0 < self.tbt_s <= MOST_TARGET_S and 0 < self.quantile < 1):
            most = f"{MOST_TARGET_S:g}"
            raise ValueError(f"targets must be > 0 s and <= {most} s and the quantile between 0 and 1, got {self}")


@dataclass(frozen=True)
class View:
    """What features are computed from. ``short`` and ``long`` end at the same reading."""

    short: StatsWindow
    long: StatsWindow
    targets: Targets = field(default_factory=Targets)
    since_change_s: float | None = None


Signal = Callable[[View], float | None]


def concurrency(view: View) -> float | None:
    running, waiting, after = view.short.gauge("running"), view.short.gauge("waiting"), view.short.after
    most = None if after is None else amount(after.max_num_seqs)
    return None if running is None or waiting is None else ratio(running + waiting, most)


def load(view: View) -> float | None:
    parts = [part for part in (view.short.gauge("kv_usage"), concurrency(view)) if part is not None]
    return min(1.0, max(parts)) if len(parts) == 2 else None


def resident(view: View, field_name: str, kv_format: str | None = None) -> float | None:
    """Sum over resident classes, of one format if given; None when any row is unusable."""
    rows = [] if view.short.after is None else view.short.after.gauges.resident
    if view.short.after is None or not isinstance(rows, list):
        return None
    values = [amount(getattr(row, field_name, None)) for row in rows if kv_format in {None, row.kv_format}]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def format_share(kv_format: str) -> Signal:
    return lambda view: ratio(resident(view, "bytes", kv_format), resident(view, "bytes"))


def share_in_use(view: View) -> float | None:
    """How much of the resident KV is held by running requests, the rest being idle prefix blocks."""
    used, cached = view.short.gauge("kv_used_bytes"), view.short.gauge("kv_cached_bytes")
    return None if used is None or cached is None else ratio(used, used + cached)


def held_tokens(view: View) -> float | None:
    """Tokens of running requests whose KV must be kept, evicted ones too; shared ones once where that can be told."""
    counted, stored, in_use = view.short.gauge("resident_tokens"), resident(view, "tokens"), share_in_use(view)
    if counted is None or stored is None or in_use is None:
        return counted
    return min(counted, stored * in_use + (view.short.gauge("evicted_running_tokens") or 0.0))


def tokens_per_sequence(view: View) -> float | None:
    return ratio(view.short.gauge("resident_tokens"), view.short.gauge("running"))


def blocks_per_sequence(view: View) -> float | None:
    rows = [] if view.short.after is None else view.short.after.gauges.resident
    parts = [ratio(amount(row.tokens), amount(row.block_size)) for row in rows] if isinstance(rows, list) else []
    known = [part for part in parts if part is not None]
    in_use, running = share_in_use(view), view.short.gauge("running")
    return ratio(sum(known) * (in_use or 1.0), running) if known and len(known) == len(parts) else None


def tail_waste(view: View) -> float | None:
    """A sequence's last block is half empty on average."""
    running, tokens = view.short.gauge("running"), view.short.gauge("resident_tokens")
    size = None if view.short.after is None else amount(view.short.after.effective.get("block_size"))
    if running is None or tokens is None or size is None or running == 0:
        return None
    wasted = running * size / 2
    return ratio(wasted, wasted + tokens)


def bytes_per_token(view: View, kv_format: str) -> float | None:
    if view.short.after is None:
        return None
    told = view.short.after.gauges.kv_bytes_per_token
    exact = amount(told.get(kv_format)) if isinstance(told, dict) else None
    if exact:
        return exact
    stored = ratio(resident(view, "bytes", "native"), resident(view, "tokens", "native"))
    return None if stored is None else stored * _ASSUMED_SHARE[kv_format]


def usual_tokens(view: View) -> float | None:
    """Tokens that a request holds on average over its life: its prompt and half of its output, long window."""
    prompt, output = view.long.mean("prompt_lengths"), view.long.mean("output_lengths")
    return None if prompt is None else 1000 * (prompt + (output or 0.0) / 2)


def demand(kv_format: str) -> Signal:
    """Tokens that running requests hold (evicted ones too) or usually will, and those of waiting ones, over the pool.

    Looking ahead matters: at the beginning of a peak all requests are young, and each will still grow.
    """

    def compute(view: View) -> float | None:
        running, waiting = view.short.gauge("running"), view.short.gauge("waiting")
        held, after = held_tokens(view), view.short.after
        if running is None or waiting is None or held is None or after is None:
            return None
        if running + waiting == 0:
            return 0.0
        usual = usual_tokens(view) or ratio(held, running) or 0.0
        most = amount(after.max_num_seqs)
        joining = waiting if most is None else min(waiting, max(0.0, most - running))
        share = ratio(bytes_per_token(view, kv_format), view.short.gauge("kv_pool_bytes"))
        return None if share is None else (max(held, running * usual) + joining * usual) * share

    return compute


def tail(name: str) -> Signal:
    return lambda view: view.short.quantile(name, view.targets.quantile)


def ttft_over_target(view: View) -> float | None:
    return ratio(view.short.quantile("ttft", view.targets.quantile), view.targets.ttft_s)


def tbt_over_target(view: View) -> float | None:
    return ratio(view.short.quantile("itl", view.targets.quantile), view.targets.tbt_s)


def attainment(window: StatsWindow, targets: Targets) -> float | None:
    """Estimated share of requests inside all targets: share of first tokens in time times share of gaps in time.

    The engine knows no targets and its histograms no request, so the two are taken as independent; a request counts
    as outside when a typical gap of the window is. None when no first token fell into the window.
    """
    first = window.share_within("ttft", targets.ttft_s)
    gaps = window.share_within("itl", targets.tbt_s)
    return None if first is None else first * (1.0 if gaps is None else gaps)


def goodput(view: View) -> float | None:
    done = view.short.rate("requests_completed")
    if done == 0:
        return 0.0
    inside = attainment(view.short, view.targets)
    return None if done is None or inside is None else done * inside


def success(view: View) -> float | None:
    done, failed, refused = (
        view.long.count(name) for name in ("requests_completed", "requests_failed", "requests_rejected")
    )
    return None if done is None or failed is None or refused is None else ratio(done, done + failed + refused)


def apdex(view: View) -> float | None:
    """Satisfied up to the TTFT target, tolerating up to four times it, failed and refused ones frustrated."""
    histogram = view.long.histogram("ttft")
    bad = [view.long.count(name) for name in ("requests_failed", "requests_rejected")]
    if histogram is None or bad[0] is None or bad[1] is None:
        return None
    satisfied = histogram.share_within(view.targets.ttft_s)
    within = histogram.share_within(4 * view.targets.ttft_s)
    if satisfied is None or within is None:
        return 0.0 if bad[0] + bad[1] else None
    return ratio((satisfied + within) / 2 * histogram.count, histogram.count + bad[0] + bad[1])


def slo_attainment(view: View) -> float | None:
    return attainment(view.short, view.targets)


def feedback(view: View) -> float | None:
    return ratio(view.long.count("feedback_sum"), view.long.count("feedback_count"))


def hit_rate(view: View) -> float | None:
    return ratio(view.long.count("prefix_cache_hits"), view.long.count("prefix_cache_queries"))


def since_change(view: View) -> float | None:
    return view.since_change_s


def rate(counter: str) -> Signal:
    """Growth per second over the short window."""
    return lambda view: view.short.rate(counter)


def long_rate(counter: str) -> Signal:
    """Growth per second over the long window."""
    return lambda view: view.long.rate(counter)


def gauge(name: str) -> Signal:
    return lambda view: view.short.gauge(name)


def time_share(counter: str) -> Signal:
    return lambda view: view.short.rate(counter, 1e-9)


def bandwidth_share(view: View) -> float | None:
    read, written = view.short.rate("kv_bytes_read"), view.short.rate("kv_bytes_written")
    return (
        None
        if read is None or written is None
        else ratio(read + written, view.short.gauge("memory_bandwidth_bytes_per_s"))
    )


def below_format(view: View) -> float | None:
    return ratio(view.short.gauge("held_below_format_bytes"), resident(view, "bytes"))


def tokens(name: str, q: float) -> Signal:
    def compute(view: View) -> float | None:
        value = view.long.quantile(name, q)
        return None if value is None else 1000 * value

    return compute
