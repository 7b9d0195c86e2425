"""What an engine's figures are called on its page; several names of one figure are tried in order, newest first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Names = tuple[str, ...]


@dataclass(frozen=True)
class MetricNames:
    """``engine``: the label that tells engines on one page apart. ``only``: see :class:`autotune.adapters.page.View`.

    ``counters``, ``gauges``, ``histograms``: by the field of :mod:`engine.stats`. ``lengths``: the same for histograms
    in tokens. ``ended``: by the field of Counters, a name, a label and the label's values that count. Fields of
    :class:`autotune.adapters.reading.PartialStats` beyond those: ``capacity_tokens`` (what the pool holds),
    ``decode_request_s`` (time that requests spent decoding, added up over requests).
    """

    prefix: str
    engine: str = "engine"
    only: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, Names] = field(default_factory=dict)
    gauges: Mapping[str, Names] = field(default_factory=dict)
    histograms: Mapping[str, Names] = field(default_factory=dict)
    lengths: Mapping[str, Names] = field(default_factory=dict)
    ended: Mapping[str, tuple[Names, str, tuple[str, ...]]] = field(default_factory=dict)
    capacity_tokens: Names = ()
    decode_request_s: Names = ()


VLLM = MetricNames(
    prefix="vllm:",
    counters={
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "generation_tokens": ("vllm:generation_tokens_total",),
        "preemptions": ("vllm:num_preemptions_total",),
        "prefix_cache_queries": (
            "vllm:prefix_cache_queries_total",
            "vllm:gpu_prefix_cache_queries_total",
        ),
        "prefix_cache_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "requests_rejected": ("vllm:admission_rejections_total",),
    },
    ended={
        "requests_completed": (("vllm:request_success_total",), "finished_reason", ("stop", "length", "repetition")),
        "requests_aborted": (("vllm:request_success_total",), "finished_reason", ("abort",)),
        "requests_failed": (("vllm:request_success_total",), "finished_reason", ("error",)),
    },
    gauges={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
    histograms={
        "ttft": ("vllm:time_to_first_token_seconds",),
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "e2e": ("vllm:e2e_request_latency_seconds",),
        "queue": ("vllm:request_queue_time_seconds",),
    },
    lengths={
        "prompt_lengths": ("vllm:request_prompt_tokens",),
        "output_lengths": ("vllm:request_generation_tokens",),
    },
    decode_request_s=("vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"),
)

SGLANG = MetricNames(
    prefix="sglang:",
    engine="dp_rank",
    # Every rank may have a page's worth of its own; with priorities, the sum over them has none.
    only={"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0", "priority": ""},
    counters={
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "generation_tokens": ("sglang:generation_tokens_total",),
        "requests_completed": ("sglang:num_requests_total",),
        "requests_aborted": ("sglang:num_aborted_requests_total",),
        "preemptions": ("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
        "prefix_cache_queries": ("sglang:prompt_tokens_total",),
        "prefix_cache_hits": ("sglang:cached_tokens_total",),
    },
    gauges={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_usage": ("sglang:token_usage",),
    },
    histograms={
        "ttft": ("sglang:time_to_first_token_seconds",),
        "itl": ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        "e2e": ("sglang:e2e_request_latency_seconds",),
        "queue": ("sglang:queue_time_seconds",),
    },
    lengths={
        "prompt_lengths": ("sglang:prompt_tokens_histogram",),
        "output_lengths": ("sglang:generation_tokens_histogram",),
    },
    capacity_tokens=("sglang:max_total_num_tokens",),
    decode_request_s=("sglang:inter_token_latency_seconds_sum", "sglang:time_per_output_token_seconds_sum"),
)

LLAMACPP = MetricNames(
    prefix="llamacpp:",
    counters={
        "prompt_tokens": ("llamacpp:prompt_tokens_total",),
        "generation_tokens": ("llamacpp:tokens_predicted_total",),
        "steps": ("llamacpp:n_decode_total",),
    },
    gauges={
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "kv_usage": ("llamacpp:kv_cache_usage_ratio",),  # until 2025
    },
    decode_request_s=("llamacpp:tokens_predicted_seconds_total",),
)
