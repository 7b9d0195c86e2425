"""Every figure that policies see: one declaration each. The Box, the documentation and the checks derive from it.

A feature is computed from windows of the engine's figures (:mod:`envs.signals`) and is None where it is unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from envs import signals
from envs.signals import FORMAT_NAMES, Signal, Targets, View
from envs.window import number

__all__ = ["FEATURES", "FORMAT_NAMES", "Feature", "Targets", "View"]


@dataclass(frozen=True)
class Feature:
    """One figure. Raw values are clipped into [low, high]; ``knee`` > 0 encodes logarithmically from there on.

    ``compute`` returns the raw value in ``unit`` or None where it is unknown.
    """

    name: str
    unit: str
    low: float
    high: float
    description: str
    compute: Signal
    knee: float = 0.0

    def read(self, view: View) -> float | None:
        """The clipped raw value, or None."""
        value = number(self.compute(view))
        return None if value is None else min(self.high, max(self.low, value))

    def encode(self, value: float) -> float:
        """A raw value inside [low, high] as 0 to 1: linear, or logarithmic above the knee."""
        if self.knee:
            return math.log1p((value - self.low) / self.knee) / math.log1p((self.high - self.low) / self.knee)
        return (value - self.low) / (self.high - self.low)


def _share(name: str, description: str, compute: Signal) -> Feature:
    return Feature(name, "", 0.0, 1.0, description, compute)


def _scale(name: str, unit: str, high: float, knee: float, description: str, compute: Signal) -> Feature:
    return Feature(name, unit, 0.0, high, description, compute, knee)


_LOAD = (
    _share("load", "max(KV usage, (running + waiting) / max_num_seqs)", signals.load),
    # Offered counts every arrival, refused ones too; completed is another thing.
    _scale("offered_rps", "req/s", 1e4, 0.1, "Arrivals, short window", signals.rate("requests_offered")),
    _scale("offered_rps_long", "req/s", 1e4, 0.1, "Arrivals, long window", signals.long_rate("requests_offered")),
    _scale("offered_prompt_tps", "tokens/s", 1e7, 10, "Arriving prompts", signals.rate("offered_prompt_tokens")),
    _scale("completed_rps", "req/s", 1e4, 0.1, "Completions, short window", signals.rate("requests_completed")),
    _scale("prompt_tokens_p50", "tokens", 1e6, 16, "Median prompt", signals.tokens("prompt_lengths", 0.5)),
    _scale("prompt_tokens_p95", "tokens", 1e6, 16, "Long prompts", signals.tokens("prompt_lengths", 0.95)),
    _scale("output_tokens_p50", "tokens", 1e6, 16, "Median output", signals.tokens("output_lengths", 0.5)),
    _scale("output_tokens_p95", "tokens", 1e6, 16, "Long outputs", signals.tokens("output_lengths", 0.95)),
    _scale("running", "requests", 1e4, 1, "Running now", signals.gauge("running")),
    _scale("waiting", "requests", 1e5, 1, "Waiting now", signals.gauge("waiting")),
    _scale("concurrency", "", 16, 0.25, "(running + waiting) / max_num_seqs", signals.concurrency),
)

_DEMAND = "KV of running and waiting requests if all of it were {}, over the pool"
_MEMORY = (
    _share("kv_usage", "KV pool in use, without reusable cached blocks", signals.gauge("kv_usage")),
    _scale("kv_demand", "", 16, 0.25, _DEMAND.format("native"), signals.demand("native")),
    _scale("kv_demand_int8", "", 16, 0.25, _DEMAND.format("int8"), signals.demand("int8")),
    _scale("kv_demand_k8v4", "", 16, 0.25, _DEMAND.format("k8v4"), signals.demand("k8v4")),
    _scale("kv_demand_int4", "", 16, 0.25, _DEMAND.format("int4"), signals.demand("int4")),
    *(
        _share(f"bytes_share_{name}", f"Resident KV bytes stored as {name}", signals.format_share(name))
        for name in FORMAT_NAMES
    ),
    _share("below_format_share", "Resident KV lossier than kv_format asks for", signals.below_format),
    _share("converged_fraction", "Resident KV in the class it should have", signals.gauge("converged_fraction")),
    _scale("tokens_per_sequence", "tokens", 1e6, 16, "Resident KV per running one", signals.tokens_per_sequence),
    _scale("blocks_per_sequence", "blocks", 1e5, 4, "Table entries per running one", signals.blocks_per_sequence),
    _share("tail_waste_share", "KV lost in half-empty last blocks at this block size", signals.tail_waste),
    _share("hit_rate", "Prompt tokens found in the prefix cache, long window", signals.hit_rate),
    _scale("preemptions_per_s", "1/s", 1e3, 0.1, "Preemptions, short window", signals.rate("preemptions")),
)

# Tails are the quantile that the targets name, short window.
_SERVICE = (
    _scale("queue_tail_s", "s", 2000, 0.01, "Arrival to first scheduled, tail", signals.tail("queue")),
    _scale("ttft_tail_s", "s", 2000, 0.01, "Time to first token, tail", signals.tail("ttft")),
    _scale("tbt_tail_s", "s", 2000, 0.001, "Time between tokens, tail", signals.tail("itl")),
    _scale("ttft_over_target", "", 100, 0.25, "TTFT tail over its target", signals.ttft_over_target),
    _scale("tbt_over_target", "", 100, 0.25, "TBT tail over its target", signals.tbt_over_target),
    _share("slo_attainment", "Requests inside all targets, estimated", signals.slo_attainment),
    _scale("goodput_rps", "req/s", 1e4, 0.1, "Requests inside all targets, estimated", signals.goodput),
    _share("success_rate", "Completed over completed, failed and refused, long window", signals.success),
    _share("apdex", "Apdex of TTFT against its target, long window", signals.apdex),
    _share("feedback", "Users' mean score, long window", signals.feedback),
)

_WORK = (
    _scale("prefill_tps", "tokens/s", 1e7, 10, "Prompt tokens computed", signals.rate("prefill_tokens_computed")),
    _scale("decode_tps", "tokens/s", 1e7, 10, "Tokens generated", signals.rate("generation_tokens")),
    _share("step_time_share", "Wall time spent in steps", signals.time_share("step_time_ns")),
    _share("recode_time_share", "Wall time spent recoding", signals.time_share("recode_time_ns")),
    _share("recompute_time_share", "Wall time spent on preempted work again", signals.time_share("recompute_time_ns")),
    _share("bandwidth_share", "KV traffic over the device's measured bandwidth", signals.bandwidth_share),
    _scale("memory_rss_bytes", "bytes", 1e13, 1e8, "Engine process", signals.gauge("memory_rss_bytes")),
    _scale("device_memory_bytes", "bytes", 1e13, 1e8, "Device", signals.gauge("device_memory_bytes")),
    _scale("since_change_s", "s", 3600, 1, "Since the knobs in force last changed", signals.since_change),
)

FEATURES: Final[tuple[Feature, ...]] = (*_LOAD, *_MEMORY, *_SERVICE, *_WORK)
