"""Puts an engine together from a model folder: weights, pool, scheduler, runner, core. Imports torch."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.cache_manager import CacheManager
from engine.clock import Clock, RealClock
from engine.core import CoreOptions, EngineCore
from engine.core_stats import CoreStats
from engine.errors import EngineError
from engine.events import NullSink
from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.quality.gate import QualityBudget, quality_gate
from engine.scheduler import Scheduler
from engine.server.intake import ServedModel
from engine.sizes import format_size
from engine.stats import Counters, Gauges
from engine.token_bytes import detokenizer_factory
from engine.tokenizer import ModelTokenizer
from engine.warmup import warm_up
from kernels import ops

if TYPE_CHECKING:
    from engine.serve import EngineOptions

# Without an explicit size the pool takes this share of what is free, on a CPU within reason.
_CUDA_SHARE = 0.85
_CPU_SHARE = 0.25
_CPU_MOST_BYTES = 1 << 30
_BANDWIDTH_BYTES = 64 << 20
_NOTICE_AFTER_S = 5.0


@dataclass(frozen=True)
class Assembly:
    """An engine ready to step, and what the server needs to know about its model."""

    core: EngineCore
    served: ServedModel
    clock: Clock
    summary: str


def assemble(options: EngineOptions) -> Assembly:
    """Load the model and build the engine. Raises EngineError for anything a user can put right."""
    clock, counters = RealClock(), Counters()
    values = options.initial_values()
    gate = None
    if options.quality_table is not None:
        budget = QualityBudget(options.quality_budget_pct)
        gate = quality_gate(options.quality_table, options.model, budget, values)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    loaded = load_model(options.model, device, options.dtype)
    tokenizer = ModelTokenizer(options.model)
    max_model_len = _max_model_len(options, loaded)
    pool_bytes = options.kv_pool_bytes or _default_pool_bytes(loaded.model.device)
    try:
        cache = CacheManager(
            loaded.groups,
            pool_bytes,
            values,
            recent_tokens=options.recent_tokens,
            sinks=options.sinks,
            watermark=options.watermark,
            clock=clock,
            events=NullSink(),
            counters=counters,
        )
    except ValueError as error:
        raise EngineError(f"{error}; give another size with --kv-pool-bytes") from error
    runner = _runner(options, loaded, cache)
    _warm_up(runner, loaded, pool_bytes, clock)
    scheduler = Scheduler(
        cache,
        values,
        max_model_len=max_model_len,
        max_waiting=options.max_waiting,
        clock=clock,
        counters=counters,
        eos_token_ids=loaded.eos_token_ids,
        recode_tokens_per_step=options.recode_budget_tokens,
    )
    served = ServedModel(
        name=options.served_model_name or loaded.name,
        tokenizer=tokenizer,
        vocab_size=loaded.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        new_detokenizer=detokenizer_factory(options.model, tokenizer.decode),
        created_s=int(clock.wall_s()),
    )
    core = EngineCore(
        scheduler,
        cache,
        runner,
        values,
        clock,
        options=CoreOptions(
            model=served.name,
            instance=uuid.uuid4().hex,
            max_model_len=max_model_len,
            idle_recode_tokens=options.idle_recode_tokens,
        ),
        stats=CoreStats(counters),
        probe=MachineProbe(loaded.model.device),
        veto=gate,
    )
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    summary = f"{loaded.model.device.type}, {dtype}, KV pool {format_size(pool_bytes)}"
    return Assembly(core, served, clock, summary)


class MachineProbe:
    """Fills in what process and device say about memory. The bandwidth is measured once, at construction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._bandwidth = measure_bandwidth(device)

    def __call__(self, gauges: Gauges) -> None:
        gauges.memory_rss_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * self._page_bytes
        if self._device.type == "cuda":
            gauges.device_memory_bytes = torch.cuda.memory_allocated(self._device)
        gauges.memory_bandwidth_bytes_per_s = self._bandwidth


def measure_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by the best of a few large copies; takes under a tenth of a second."""
    source = torch.zeros(_BANDWIDTH_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        _synchronise(device)
        begin = time.perf_counter()
        target.copy_(source)
        _synchronise(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * _BANDWIDTH_BYTES / best


def _runner(options: EngineOptions, loaded: LoadedModel, cache: CacheManager) -> ModelRunner:
    sizes = [cache.group_arena_bytes(group) for group in range(len(loaded.groups))]
    try:
        return ModelRunner(loaded, sizes, ops, rng=random.Random(options.seed))
    except (torch.OutOfMemoryError, RuntimeError) as error:
        wanted = format_size(sum(sizes))
        raise EngineError(f"a KV pool of {wanted} does not fit the device; give less with --kv-pool-bytes") from error


def _warm_up(runner: ModelRunner, loaded: LoadedModel, pool_bytes: int, clock: Clock) -> None:
    hint = "engine: compiling kernels; the first start on a machine takes a minute or two"
    notice = threading.Timer(_NOTICE_AFTER_S, lambda: print(hint, file=sys.stderr, flush=True))  # noqa: T201
    notice.daemon = True
    notice.start()
    try:
        warm_up(runner, loaded.groups, pool_bytes, clock)
    except Exception as error:
        device = loaded.model.device
        raise EngineError(f"the kernels do not run on {device}: {type(error).__name__}: {error}") from error
    finally:
        notice.cancel()


def _max_model_len(options: EngineOptions, loaded: LoadedModel) -> int:
    most = loaded.config.max_model_len
    if options.max_model_len is None:
        return most
    if not 1 < options.max_model_len <= most:
        raise EngineError(f"--max-model-len {options.max_model_len}: this model takes 2 to {most} tokens")
    return options.max_model_len


def _default_pool_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_CPU_MOST_BYTES, int(free * _CPU_SHARE))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
