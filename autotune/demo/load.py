"""The demonstration's load: a workload's traces, sized to a measured machine and to the model's KV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotune.demo.sizing import Memory, Rates, SizedLoad, length_scale, size
from engine.formats import NATIVE
from engine.memory_model import SLAB_TOKENS, bytes_by_format
from engine.models.dtypes import DTYPE_BYTES, resolve_dtype
from engine.models.folder import read_config
from engine.models.groups import layer_groups
from engine.models.registry import parse_config
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
    """KV sizes of a model folder under ``--dtype``, as the engine lays KV out. Raises EngineError."""
    config = parse_config(read_config(model))
    groups = layer_groups(config, DTYPE_BYTES[resolve_dtype(dtype, config.dtype)])
    sizes = bytes_by_format(groups)
    return Memory(
        native_token_bytes=sizes[NATIVE.name],
        small_token_bytes=min(sizes.values()),
        always_native_tokens=RECENT_TOKENS + BLOCK_TOKENS,
        slab_tokens=SLAB_TOKENS[-1],
        least_slabs=LEAST_SLABS,
        max_model_len=config.max_model_len,
    )


def _mean_lengths(trace: Trace) -> tuple[float, float]:
    number = len(trace.requests)
    return trace.prompt_tokens / number, trace.output_tokens / number
