"""Fits what can be fitted to the metrics page of a running server; what it does not tell stays as it was estimated.

Ours tells the work and the time of its steps. vLLM tells neither: there a decoding request's gap between tokens stands
for a step, the number of running requests for its width, and tokens per iteration for the prompts in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from engine.text import one_line
from envs.nnls import nnls

_OURS: Final = "autotune_engine_"
_VLLM: Final = "vllm:"
_LEAST_WINDOWS: Final = 4


@dataclass(frozen=True)
class Window:
    """Work of an average step in one window, and its seconds."""

    decode_sequences: float
    prefill_tokens: float
    kv_bytes: float | None
    step_s: float


@dataclass(frozen=True)
class MetricsFit:
    """Seconds by term for the terms that the windows could tell, and the median relative error over ``windows``."""

    seconds: Mapping[str, float]
    median_error: float
    windows: int
    server: str


def read_page(text: str) -> dict[str, float]:
    """Every sample of a Prometheus page by name, label sets added up. Raises ValueError for anything else."""
    values: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # the parser's
        raise ValueError(one_line(f"not a Prometheus page: {error!r}")) from error
    return values


def window(before: Mapping[str, float], after: Mapping[str, float]) -> Window | None:
    """The average step between two readings; None when nothing ran. Raises ValueError for an unknown server."""
    if any(name.startswith(_OURS) for name in after):
        return _our_window(before, after)
    if any(name.startswith(_VLLM) for name in after):
        return _vllm_window(before, after)
    raise ValueError("the page is neither a kv-autotune engine's nor vLLM's")


def _our_window(before: Mapping[str, float], after: Mapping[str, float]) -> Window | None:
    def grown(name: str) -> float:
        return after.get(f"{_OURS}{name}_total", 0.0) - before.get(f"{_OURS}{name}_total", 0.0)

    steps, seconds = grown("steps"), grown("step_seconds")
    if steps < 1 or seconds <= 0:
        return None
    return Window(
        grown("decode_tokens_computed") / steps,
        grown("prefill_tokens_computed") / steps,
        grown("kv_read_bytes") / steps,
        seconds / steps,
    )


def _vllm_window(before: Mapping[str, float], after: Mapping[str, float]) -> Window | None:
    def grown(*names: str) -> float:
        return sum(after.get(f"{_VLLM}{name}", 0.0) - before.get(f"{_VLLM}{name}", 0.0) for name in names)

    # The older name of the same histogram; a server has one of the two.
    gaps = grown("inter_token_latency_seconds_count", "time_per_output_token_seconds_count")
    seconds = grown("inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum")
    running = (before.get(f"{_VLLM}num_requests_running", 0.0) + after.get(f"{_VLLM}num_requests_running", 0.0)) / 2
    if gaps < 1 or seconds <= 0 or running <= 0:
        return None
    steps = grown("iteration_tokens_total_count") or gaps / running
    return Window(running, max(0.0, grown("prompt_tokens_total")) / steps, None, seconds / gaps)


def fit_windows(windows: Sequence[Window], kv_bytes_per_token_layer: float, server: str) -> MetricsFit:
    """Coefficients of the fixed part, decoding sequences, prompt tokens and, where told, KV.

    A term that hardly varied over the windows cannot be told from the fixed part, and is left out. Raises ValueError
    with under four windows of work.
    """
    if len(windows) < _LEAST_WINDOWS:
        raise ValueError(
            f"{len(windows)} windows with work are too few to fit anything; watch a busier server, or longer"
        )
    columns = {
        "step": [1.0] * len(windows),
        "decode_sequence": [w.decode_sequences for w in windows],
        "prefill_token": [w.prefill_tokens for w in windows],
    }
    if all(w.kv_bytes is not None for w in windows):
        columns["decode_kv_native"] = [(w.kv_bytes or 0.0) / kv_bytes_per_token_layer for w in windows]
    told = [name for name, values in columns.items() if name == "step" or _varies(values)]
    matrix = np.array([columns[name] for name in told]).T
    times = np.array([w.step_s for w in windows])
    values = nnls(matrix / times[:, None], np.ones(len(times)))
    errors = np.abs(matrix @ values / times - 1)
    fitted = {name: float(value) for name, value in zip(told, values, strict=True)}
    return MetricsFit(fitted, float(np.median(errors)), len(windows), server)


def _varies(values: Sequence[float]) -> bool:
    spread, level = float(np.ptp(values)), float(np.mean(values))
    return level > 0 and spread > 0.2 * level
