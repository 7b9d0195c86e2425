"""Fit a trace made for a big machine to the one at hand, and say by how much. Stdlib and numpy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from envs.workload.trace import Trace, TraceError, TraceRequest


@dataclass(frozen=True)
class Scaling:
    """Applied in this order: thin, stretch, cut in time and number, divide lengths, cap lengths.

    ``length_scale`` divides prompt and output lengths (and the tokens of a shared block); ``time_scale`` multiplies
    arrival times (2 halves the rate), or ``rate_rps`` is the mean rate that they get; ``keep`` is the share of requests
    that is kept, at random under ``seed``.
    """

    length_scale: float = 1.0
    time_scale: float = 1.0
    keep: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    duration_s: float | None = None
    max_requests: int | None = None
    seed: int = 0
    rate_rps: float | None = None

    def __post_init__(self) -> None:
        for name in ("length_scale", "time_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a number > 0, got {value}")
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be in (0, 1], got {self.keep}")
        if self.rate_rps is not None and self.time_scale != 1:
            raise ValueError("time_scale and rate_rps both stretch arrivals: give one of the two")
        for name in ("max_prompt_tokens", "max_output_tokens", "duration_s", "max_requests", "rate_rps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def scale(trace: Trace, scaling: Scaling) -> Trace:
    """The scaled trace; a note for every change says by how much. Raises TraceError when nothing is left."""
    requests, notes = list(trace.requests), []
    if scaling.keep < 1:
        kept = np.random.default_rng(scaling.seed).random(len(requests)) < scaling.keep
        requests = [request for request, stays in zip(requests, kept, strict=True) if stays]
        notes.append(f"thinned to {scaling.keep:.3g} of the requests: {len(requests)} of {len(trace.requests)}")
    stretch, aim = scaling.time_scale, ""
    if scaling.rate_rps is not None:
        span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
        if span_s <= 0:
            raise TraceError(f"{trace.name}: {len(requests)} requests at one time have no rate that could be scaled")
        stretch, aim = (len(requests) - 1) / span_s / scaling.rate_rps, f", to {scaling.rate_rps:g} requests/s"
    if stretch != 1:
        requests = [replace(request, arrival_s=request.arrival_s * stretch) for request in requests]
        notes.append(f"arrival times multiplied by {stretch:.4g}{aim}")
    if scaling.duration_s is not None:
        before = len(requests)
        requests = [request for request in requests if request.arrival_s < scaling.duration_s]
        notes.append(f"cut at {scaling.duration_s:g} s: {len(requests)} of {before} requests")
    if scaling.max_requests is not None and len(requests) > scaling.max_requests:
        notes.append(f"cut after {scaling.max_requests} of {len(requests)} requests")
        requests = requests[: scaling.max_requests]
    if not requests:
        raise TraceError(f"{trace.name}: no request is left after scaling ({'; '.join(notes)})")
    requests, length_notes = _scale_lengths(requests, scaling)
    return replace(
        trace,
        requests=tuple(requests),
        block_tokens=trace.block_tokens / scaling.length_scale,
        notes=(*trace.notes, *notes, *length_notes),
    )


def cap_context(trace: Trace, max_model_len: int) -> Trace:
    """Cut requests that a context of ``max_model_len`` tokens cannot hold: the prompt first to what leaves room.

    The output keeps its length up to half of the context.
    """
    cut = 0
    requests = []
    for request in trace.requests:
        output = min(request.output_tokens, max(1, max_model_len // 2))
        prompt = min(request.prompt_tokens, max(1, max_model_len - output))
        if (prompt, output) != (request.prompt_tokens, request.output_tokens):
            cut += 1
            request = replace(request, prompt_tokens=prompt, output_tokens=output)  # noqa: PLW2901
        requests.append(request)
    if not cut:
        return trace
    note = f"{cut} of {len(requests)} requests cut to the server's context of {max_model_len} tokens"
    return replace(trace, requests=tuple(requests), notes=(*trace.notes, note))


def _scale_lengths(requests: list[TraceRequest], scaling: Scaling) -> tuple[list[TraceRequest], list[str]]:
    prompt_cap = scaling.max_prompt_tokens or math.inf
    output_cap = scaling.max_output_tokens or math.inf
    capped_prompts = capped_outputs = 0
    scaled = []
    for request in requests:
        prompt = max(1, round(request.prompt_tokens / scaling.length_scale))
        output = max(1, round(request.output_tokens / scaling.length_scale))
        capped_prompts += prompt > prompt_cap
        capped_outputs += output > output_cap
        scaled.append(
            replace(request, prompt_tokens=int(min(prompt, prompt_cap)), output_tokens=int(min(output, output_cap)))
        )
    notes = []
    if scaling.length_scale != 1:
        notes.append(f"prompt and output lengths divided by {scaling.length_scale:g}")
    if capped_prompts:
        notes.append(f"{capped_prompts} prompts cut to {scaling.max_prompt_tokens} tokens")
    if capped_outputs:
        notes.append(f"{capped_outputs} outputs cut to {scaling.max_output_tokens} tokens")
    return scaled, notes
