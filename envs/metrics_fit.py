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
from envs.nnls import Floats, nnls

_OURS: Final = "autotune_engine_"
_VLLM: Final = "vllm:"
_LEAST_WINDOWS: Final = 4
_PARTS: Final = 8  # of the windows, each left out in turn
_STEADY: Final = 0.5  # of a price: how far it may move when a part is left out
_LEAST_SHARE: Final = 0.1
TOLD: Final[tuple[str, ...]] = ("decode_sequence", "prefill_token", "decode_kv_native")
"""Terms besides the fixed part that metrics may tell."""


@dataclass(frozen=True)
class Window:
    """Work of an average step in one window, and its seconds."""

    decode_sequences: float
    prefill_tokens: float
    kv_bytes: float | None
    step_s: float


@dataclass(frozen=True)
class MetricsFit:
    """Seconds by term for the terms that the windows could tell; ``untold``: why the others of TOLD could not be.

    Median and 90th percentile of relative errors at windows that were left out of the fit, ``windows`` in all.
    """

    seconds: Mapping[str, float]
    median_error: float
    p90_error: float
    windows: int
    server: str
    untold: Mapping[str, str]


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


def fit_windows(
    windows: Sequence[Window], kv_bytes_per_token_layer: float, server: str, prices: Mapping[str, float] | None = None
) -> MetricsFit:
    """Coefficients of the fixed part, decoding sequences, prompt tokens and, where told, KV.

    A term that the windows cannot tell is left out, one at a time: one that hardly varied, that came out as nothing, or
    whose price hangs on which windows are looked at, as it does where two of them rise and fall together. It then costs
    what ``prices`` (seconds) say, and the others get the rest of the time. Raises ValueError with under four windows of
    work.
    """
    if len(windows) < _LEAST_WINDOWS:
        raise ValueError(
            f"{len(windows)} windows with work are too few to fit anything; watch a busier server, or longer"
        )
    work = {
        "step": np.ones(len(windows)),
        "decode_sequence": np.array([w.decode_sequences for w in windows]),
        "prefill_token": np.array([w.prefill_tokens for w in windows]),
    }
    untold: dict[str, str] = {}
    if all(w.kv_bytes is not None for w in windows):
        work["decode_kv_native"] = np.array([(w.kv_bytes or 0.0) / kv_bytes_per_token_layer for w in windows])
    else:
        untold["decode_kv_native"] = "not on the page"
    untold |= {name: "hardly varied" for name, column in work.items() if name != "step" and not _varies(column)}
    times = np.array([w.step_s for w in windows])
    known = {name: (prices or {}).get(name, 0.0) * column for name, column in work.items()}
    while True:
        told = [name for name in work if name not in untold]
        given = sum((known[name] for name in work if name in untold), np.zeros(len(times)))
        # Prices of another device may be more than all of the time: what is fitted keeps a part of it.
        found = _fit(np.array([work[name] for name in told]).T, np.maximum(times - given, _LEAST_SHARE * times), times)
        worst = _least_sure(told, found)
        if worst is None:
            break
        untold[worst[0]] = worst[1]
    fitted = {name: float(value) for name, value in zip(told, found.values, strict=True)}
    median, p90 = (float(np.quantile(found.left_out, q)) for q in (0.5, 0.9))
    why = {name: untold[name] for name in TOLD if name in untold}
    return MetricsFit(fitted, median, p90, len(windows), server, why)


@dataclass(frozen=True)
class _Fit:
    """``values`` [terms]; ``spread`` [terms]: how far they move when a part of the windows is left out, relatively;
    ``left_out`` [windows]: relative errors at those, over the whole time of a step.
    """

    values: Floats
    spread: Floats
    left_out: Floats


def _fit(matrix: Floats, rest: Floats, times: Floats) -> _Fit:
    values = _solved(matrix, rest)
    parts = min(_PARTS, len(rest))
    left_out, moved = np.zeros(len(rest)), np.zeros_like(values)
    for part in range(parts):
        out = np.arange(len(rest)) % parts == part
        others = _solved(matrix[~out], rest[~out])
        left_out[out] = np.abs(matrix[out] @ others - rest[out]) / times[out]
        moved = np.maximum(moved, np.abs(others - values))
    return _Fit(values, np.divide(moved, values, out=np.full_like(values, np.inf), where=values > 0), left_out)


def _least_sure(told: Sequence[str], found: _Fit) -> tuple[str, str] | None:
    """The term that tells least, and why it is left out; None when all of them can be told. The fixed part stays."""
    unsure = [(spread, name) for name, spread in zip(told[1:], found.spread[1:], strict=True) if spread > _STEADY]
    if not unsure:
        return None
    spread, name = max(unsure)
    return name, "came out as nothing" if np.isinf(spread) else "not to be told from the others"


def _solved(matrix: Floats, rest: Floats) -> Floats:
    return nnls(matrix / rest[:, None], np.ones(len(rest)))


def _varies(values: Floats) -> bool:
    spread, level = float(np.ptp(values)), float(np.mean(values))
    return level > 0 and spread > 0.2 * level
