"""What an engine says about itself between two steps: gauges, and how far a change has come. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.cache_manager import CacheManager
from engine.clock import Clock
from engine.core_options import CoreOptions
from engine.core_stats import CoreStats
from engine.memory_model import bytes_by_format
from engine.scheduler import Scheduler
from engine.sizes import format_size
from engine.stats import EngineStats, Gauges, Histogram
from engine.tunable_state import APPLIED, CONVERGING, KnobOutcome, TunableState
from engine.tunables import TunableValue
from kernels.layout import NATIVE


def read_gauges(scheduler: Scheduler) -> Gauges:
    """All gauges but those of process and device. O(classes + sequences): for readings, not for every step."""
    cache = scheduler.cache
    usage = cache.usage()
    return Gauges(
        running=len(scheduler.running),
        waiting=scheduler.num_waiting,
        kv_usage=usage.kv_usage,
        kv_pool_bytes=usage.pool_bytes,
        kv_used_bytes=usage.used_bytes,
        kv_cached_bytes=usage.cached_bytes,
        host_pool_bytes=usage.host_pool_bytes,
        host_used_bytes=usage.host_used_bytes,
        host_cached_bytes=usage.host_cached_bytes,
        parked=scheduler.num_parked,
        loading=len(scheduler.loading),
        host_link_bytes_per_s=cache.link.in_bytes_per_s if cache.link is not None else None,
        host_link_is_emulated=cache.link.is_emulated if cache.link is not None else None,
        kv_pinned_bytes=usage.pinned_bytes,
        prefix_pins=len(cache.pins),
        resident=cache.resident(),
        converged_fraction=cache.converged_fraction(),
        held_below_format_bytes=usage.held_below_format_bytes,
        resident_tokens=usage.resident_tokens,
        evicted_running_tokens=usage.evicted_tokens,
        evicted_held_bytes=usage.hidden_bytes,
        kv_bytes_per_token=bytes_by_format(cache.groups),
    )


def read_stats(
    options: CoreOptions, tunables: TunableState, recorded: CoreStats, gauges: Gauges, stamp_ns: int
) -> EngineStats:
    """A reading of an engine; a copy."""
    return EngineStats(
        instance=options.instance,
        model=options.model,
        stamp_ns=stamp_ns,
        max_model_len=options.max_model_len,
        max_num_seqs=int(tunables.effective["max_num_seqs"]),
        revision=tunables.revision,
        effective=dict(tunables.effective),
        counters=replace(recorded.counters),
        gauges=gauges,
        **{
            name: Histogram(list(histogram.counts), histogram.sum_s)
            for name, histogram in (
                ("ttft", recorded.ttft),
                ("itl", recorded.itl),
                ("e2e", recorded.e2e),
                ("queue", recorded.queue),
                ("prompt_lengths", recorded.prompt_lengths),
                ("output_lengths", recorded.output_lengths),
            )
        },
    )


def tunables_json(instance: str, state: TunableState, gauges: Gauges) -> dict[str, Any]:
    """The answer of ``GET /v1/tunables``."""
    return {
        "instance": instance,
        "revision": state.revision,
        "desired": dict(state.desired),
        "effective": dict(state.effective),
        "writers": {name: vars(record).copy() for name, record in state.writers.items()},
        "progress": {
            "resident": [vars(row).copy() for row in gauges.resident],
            "converged_fraction": gauges.converged_fraction,
            "held_below_format_bytes": gauges.held_below_format_bytes,
        },
    }


def progress(name: str, desired: TunableValue, scheduler: Scheduler) -> KnobOutcome:
    """Whether a knob's value holds for everything already, and if not, what is left."""
    running = len(scheduler.running)
    if name == "max_num_seqs" and running > int(desired):
        return KnobOutcome(CONVERGING, f"{running} requests still run; none is stopped, none is started")
    if name == "kv_format":
        held = scheduler.cache.usage().held_below_format_bytes
        if held:
            # Lost precision is not invented again: there is nothing to converge to.
            why = f"for new KV; {format_size(held)} of resident KV stay in a lossier format"
            return KnobOutcome(APPLIED if desired == NATIVE.name else _convergence(scheduler.cache).status, why)
    if name == "host_offload":
        return _offload(str(desired), scheduler)
    return _convergence(scheduler.cache) if name in {"kv_format", "block_size"} else KnobOutcome(APPLIED)


def _offload(desired: str, scheduler: Scheduler) -> KnobOutcome:
    host = scheduler.cache.host
    if desired == "on":
        if host is not None and not host.enabled:
            return KnobOutcome(CONVERGING, "stopped after a copy failed; set it off and on again")
        return KnobOutcome(APPLIED)
    held = scheduler.cache.usage().host_used_bytes
    if held:
        return KnobOutcome(
            CONVERGING, f"{format_size(held)} that requests hold on the host come back when these run again"
        )
    return KnobOutcome(APPLIED)


def _convergence(cache: CacheManager) -> KnobOutcome:
    share = cache.converged_fraction()
    if share < 1:
        return KnobOutcome(CONVERGING, f"{share:.1%} of resident KV is stored as it should be")
    return KnobOutcome(APPLIED)


def audit_json(cache: CacheManager, clock: Clock) -> dict[str, Any]:
    """The answer of ``GET /v1/audit``: what the cache's books contradict themselves in, None where all agree."""
    begin_ns, problem = clock.now_ns(), None
    try:
        cache.check_integrity()
    except Exception as error:  # noqa: BLE001 - an audit that breaks on the books has found them broken
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return {"problem": problem, "took_s": (clock.now_ns() - begin_ns) / 1e9}
