"""The series that the fleet is read from. Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Gauges of engines that have no daemon, by what they tell; whoever makes the engine names them.
ENGINE_GAUGES: Final[Mapping[str, str]] = {
    "autotune_engine_load": "load",
    "autotune_engine_kv_cache_usage": "kv_usage",
    "autotune_engine_num_requests_running": "running",
    "autotune_engine_num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "sglang:token_usage": "kv_usage",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "llamacpp:requests_processing": "running",
    "llamacpp:requests_deferred": "waiting",
}
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
