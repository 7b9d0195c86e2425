"""The demonstration's load: a workload's traces, sized to a measured machine and to the model's KV."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from autotune.demo.sizing import Memory, Rates, SizedLoad, length_scale, size
from engine.formats import FORMATS, KVShape
from engine.memory_model import SLAB_TOKENS, token_bytes
from envs.workload.arrivals import Envelope
from envs.workload.generators import Workload, generate
from envs.workload.scaling import Scaling, cap_context, scale
from envs.workload.trace import Trace

# What the engine keeps native of every sequence: its recent tokens and the block being written.
RECENT_TOKENS, BLOCK_TOKENS = 64, 16
LEAST_SLABS = 8  # fewer, and the slabs of several classes of block get into each other's way


def sized_traces(
    workload: Workload, rates: Rates, memory: Memory, *, duration_s: float, number: int, seed: int
) -> tuple[SizedLoad, list[Trace]]:
    """The load and ``number`` traces of it, each of another seed."""
    sample = generate(workload, duration_s=10_000.0, seed=seed)
    divisor = length_scale(rates, *_mean_lengths(sample), memory.max_model_len)
    mean = _mean_lengths(cap_context(scale(sample, Scaling(length_scale=divisor)), memory.max_model_len))
    load = size(rates, memory, divisor, *mean)
    traces = [make_trace(workload, load, memory.max_model_len, duration_s, seed + index) for index in range(number)]
    return load, traces


def make_trace(workload: Workload, load: SizedLoad, max_model_len: int, duration_s: float, seed: int) -> Trace:
    """The workload with its peaks at the sized rate and its lengths divided as sized.

    A pattern of peaks is stretched or squeezed to the duration, so that all of them take part.
    """
    rate = workload.rate
    if isinstance(rate, Envelope):
        peak, stretch = max(rate.rates_rps), duration_s / rate.duration_s
        workload = replace(workload, rate=Envelope(tuple(edge * stretch for edge in rate.edges_s), rate.rates_rps))
    else:
        peak = rate.high_rps
    trace = generate(workload, duration_s=duration_s, seed=seed, rate_scale=load.peak_rps / peak)
    return cap_context(scale(trace, Scaling(length_scale=load.length_scale)), max_model_len)


def kv_memory(model: Path, dtype: str) -> Memory:
    """KV sizes of a model folder at the engine's defaults. Raises ValueError without a usable config.json."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        shape = KVShape(
            num_layers=int(config["num_hidden_layers"]),
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            element_bytes=4 if "float32" in (dtype, config.get("torch_dtype", config.get("dtype"))) else 2,
        )
        longest = int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{model} is not a model folder: {error}") from error
    return Memory(
        native_token_bytes=token_bytes(shape),
        small_token_bytes=min(token_bytes(shape, kv_format) for kv_format in FORMATS),
        always_native_tokens=RECENT_TOKENS + BLOCK_TOKENS,
        slab_tokens=SLAB_TOKENS[-1],
        least_slabs=LEAST_SLABS,
        max_model_len=longest,
    )


def _mean_lengths(trace: Trace) -> tuple[float, float]:
    number = len(trace.requests)
    return trace.prompt_tokens / number, trace.output_tokens / number
