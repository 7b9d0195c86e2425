"""Puts an engine together from a model folder: weights, pool, scheduler, runner, core. Imports torch."""

from __future__ import annotations

import logging
import os
import random
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.bandwidth import measure_bandwidth, measure_link
from engine.cache_manager import CacheManager
from engine.clock import Clock, RealClock
from engine.core import EngineCore
from engine.core_options import CoreOptions
from engine.core_stats import CoreStats
from engine.default_pool import default_pool_bytes
from engine.errors import EngineError
from engine.events import NullSink
from engine.links import CudaMover, EmulatedMover, Mover, host_arenas
from engine.loader import LoadedModel, load_model
from engine.logs import ANNOUNCEMENTS
from engine.machine_info import about
from engine.model_runner import ModelRunner
from engine.prefix_policy import parity_tokens
from engine.quality.gate import QualityBudget, quality_gate
from engine.scheduler import Scheduler
from engine.server.intake import ServedModel
from engine.sizes import format_size
from engine.stats import Counters, Gauges
from engine.stream_layout import STAGING_PART
from engine.streaming import CudaStreamer, EmulatedStreamer, Streamer
from engine.token_bytes import detokenizer_factory
from engine.tokenizer import ModelTokenizer
from engine.transfers import EMULATED_LINK_SHARE, HostLink
from engine.warmup import warm_up
from kernels import ops

if TYPE_CHECKING:
    from engine.options import EngineOptions

# Of a step's time, what recoding may add to it: gaps between tokens grow by that much while a conversion lasts.
_RECODE_SHARE = 0.15
# A GPU recodes while the processor goes on, so that clocks here do not see its time: there, so many tokens per step.
_CUDA_RECODE_TOKENS = 512
_NOTICE_AFTER_S = 5.0


@dataclass(frozen=True)
class Assembly:
    """An engine ready to step, and what the server needs to know about its model."""

    core: EngineCore
    served: ServedModel
    clock: Clock
    summary: str
    about: Mapping[str, str]


def assemble(options: EngineOptions) -> Assembly:
    """Load the model and build the engine. Raises EngineError for anything a user can put right."""
    clock, counters = RealClock(), Counters()
    values = options.initial_values()
    gate = None
    if options.quality_table is not None:
        budget = QualityBudget(options.quality_budget_pct)
        gate = quality_gate(options.quality_table, options.model, budget, values)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    loaded = load_model(options.model, device, options.dtype, protect_layers=options.protect_layers)
    tokenizer = ModelTokenizer(options.model)
    max_model_len = _max_model_len(options, loaded)
    pool_bytes = options.kv_pool_bytes or _default_pool_bytes(loaded.model.device)
    probe = MachineProbe(loaded.model.device)
    link = _link(options, loaded.model.device, probe.bandwidth) if options.host_pool_bytes else None
    staging_bytes = pool_bytes // STAGING_PART if link is not None else 0
    try:
        cache = CacheManager(
            loaded.groups,
            pool_bytes - staging_bytes,
            values,
            recent_tokens=options.recent_tokens,
            sinks=options.sinks,
            watermark=options.watermark,
            clock=clock,
            events=NullSink(),
            counters=counters,
            pin_share=options.prefix_pin_share,
            parity_tokens=parity_tokens(loaded.config.hidden_size),
            host_pool_bytes=options.host_pool_bytes,
            link=link,
            staging_bytes=staging_bytes,
        )
    except ValueError as error:
        raise EngineError(_pool_advice(str(error))) from error
    recode_tokens, recode_share = _recode_pace(options, loaded.model.device)
    runner = _runner(options, loaded, cache)
    _warm_up(runner, loaded, cache.layout.total_bytes, clock)
    scheduler = Scheduler(
        cache,
        values,
        max_model_len=max_model_len,
        max_waiting=options.max_waiting,
        clock=clock,
        counters=counters,
        eos_token_ids=loaded.eos_token_ids,
        recode_tokens_per_step=recode_tokens,
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
            recode_share=recode_share,
        ),
        stats=CoreStats(counters),
        probe=probe,
        mover=_mover(cache, runner, clock) if link is not None else None,
        veto=gate,
    )
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    summary = f"{loaded.model.device.type}, {dtype}, KV pool {format_size(pool_bytes)}"
    if link is not None:
        kind = "emulated link" if link.is_emulated else "link"
        rate = format_size(int(link.in_bytes_per_s))
        summary += f", host pool {format_size(options.host_pool_bytes)} over an {kind} of {rate}/s"
    told = about(loaded.model.device.type, dtype, torch.__version__, loaded.model.products)
    return Assembly(core, served, clock, summary, told)


class MachineProbe:
    """Fills in what process and device say about memory. The bandwidth is measured once, at construction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self.bandwidth = measure_bandwidth(device)

    def __call__(self, gauges: Gauges) -> None:
        gauges.memory_rss_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * self._page_bytes
        if self._device.type == "cuda":
            gauges.device_memory_bytes = torch.cuda.memory_allocated(self._device)
        gauges.memory_bandwidth_bytes_per_s = self.bandwidth


def _link(options: EngineOptions, device: torch.device, bandwidth: float) -> HostLink:
    """A GPU's link is measured; without one it is emulated, at the rate that was asked for."""
    if device.type == "cuda":
        return HostLink(*measure_link(device), is_emulated=False)
    rate = options.host_link_bytes_per_s or bandwidth * EMULATED_LINK_SHARE
    return HostLink(rate, rate)


def _mover(cache: CacheManager, runner: ModelRunner, clock: Clock) -> Mover:
    sizes = [cache.group_host_bytes(group) for group in range(len(cache.groups))]
    device, link = runner.arenas[0].device, cache.link
    try:
        hosts = host_arenas(sizes, device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        wanted = format_size(sum(sizes))
        raise EngineError(f"a host pool of {wanted} does not fit; give less with --host-pool-bytes") from error
    if link is None:
        raise EngineError("a host pool needs a link")
    streamer: Streamer
    mover: Mover
    if link.is_emulated:
        emulated = EmulatedMover(runner.arenas, hosts, link, clock, ops.copy_bytes)
        mover, streamer = emulated, EmulatedStreamer(runner.arenas, hosts, emulated.line, clock, ops.copy_bytes)
    else:
        mover = CudaMover(runner.arenas, hosts, link, ops.copy_bytes)
        streamer = CudaStreamer(runner.arenas, hosts, ops.copy_bytes)
    runner.stream_with(streamer, cache.stream_places())
    return mover


def _pool_advice(message: str) -> str:
    """The cache's own words and the option that they are about; what to do is said once."""
    option = "--host-pool-bytes" if "host" in message else "--kv-pool-bytes"
    if option in message:
        return message
    return f"{message} with {option}" if "; give it" in message else f"{message}; give another size with {option}"


def _runner(options: EngineOptions, loaded: LoadedModel, cache: CacheManager) -> ModelRunner:
    sizes = [cache.group_arena_bytes(group) for group in range(len(loaded.groups))]
    try:
        return ModelRunner(loaded, sizes, ops, rng=random.Random(options.seed))
    except (torch.OutOfMemoryError, RuntimeError) as error:
        wanted = format_size(sum(sizes))
        raise EngineError(f"a KV pool of {wanted} does not fit the device; give less with --kv-pool-bytes") from error


def _warm_up(runner: ModelRunner, loaded: LoadedModel, pool_bytes: int, clock: Clock) -> None:
    hint = "compiling kernels; the first start on a machine takes a minute or two"
    notice = threading.Timer(_NOTICE_AFTER_S, logging.getLogger(ANNOUNCEMENTS).info, args=(hint,))
    notice.daemon = True
    notice.start()
    try:
        ops.warm_up(loaded.model.device, loaded.model.dtype)
        loaded.model.warm_up()
        warm_up(runner, loaded.groups, pool_bytes, clock)
    except Exception as error:
        device = loaded.model.device
        raise EngineError(f"the kernels do not run on {device}: {type(error).__name__}: {error}") from error
    finally:
        notice.cancel()


def _recode_pace(options: EngineOptions, device: torch.device) -> tuple[int, float]:
    """Tokens per step, and the share of its time instead (0: none)."""
    if options.recode_budget_tokens is not None:
        return options.recode_budget_tokens, 0.0
    return (_CUDA_RECODE_TOKENS, 0.0) if device.type == "cuda" else (0, _RECODE_SHARE)


def _max_model_len(options: EngineOptions, loaded: LoadedModel) -> int:
    most = loaded.config.max_model_len
    if options.max_model_len is None:
        return most
    if not 1 < options.max_model_len <= most:
        raise EngineError(f"--max-model-len {options.max_model_len}: this model takes 2 to {most} tokens")
    return options.max_model_len


def _default_pool_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return default_pool_bytes(torch.cuda.mem_get_info(device)[0], is_gpu=True)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return default_pool_bytes(free, is_gpu=False)
