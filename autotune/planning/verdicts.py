"""Whether GPU, processor and host memory are enough, and what would be. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.planning.build import held_by, setting_of
from autotune.planning.machine import cores_needed, host_bytes_needed
from autotune.planning.plan import Plan
from engine.default_pool import GPU_SHARE
from engine.footprint import pool_bytes_for
from engine.sizes import format_size
from engine.stream_layout import STAGING_PART
from envs.analytic import DEVICES


@dataclass(frozen=True)
class Verdict:
    """``fits``: None where not enough was said to tell. ``remedies``: what would do, nearest first."""

    what: str
    fits: bool | None
    found: str
    remedies: tuple[str, ...] = ()


def verdicts(plan: Plan) -> list[Verdict]:
    """Device, sessions, processor, host memory."""
    return [_device(plan), *_sessions(plan), _processor(plan), _host(plan)]


def _device(plan: Plan) -> Verdict:
    memory, machine = plan.memory, plan.machine
    where = machine.device if machine.is_gpu else "this memory"
    weights = format_size(memory.weights + memory.packed)
    if plan.problem and memory.free <= 0:
        needed = memory.runtime + memory.weights + memory.packed
        found = f"{weights} of weights do not fit {where} ({format_size(memory.total)})"
        return Verdict("device", False, found, tuple(_devices(needed)))
    if plan.problem:
        return Verdict("device", False, plan.problem)
    if memory.left < 0:
        found = f"weights and pool are {format_size(-memory.left)} more than {where} has"
        least = memory.free - memory.host_pool * (not memory.is_host_apart)
        remedies = (f"--kv-pool-bytes {least}",) if least > 0 else ()
        return Verdict("device", False, found, remedies + tuple(_devices(memory.total - memory.left)))
    found = (
        f"{weights} of weights, {format_size(memory.pool)} for KV, {format_size(memory.left)} left for activations "
        f"and about {format_size(memory.runtime)} for runtime and libraries (estimated)"
    )
    return Verdict("device", True, found)


def _sessions(plan: Plan) -> Iterator[Verdict]:
    asked = plan.question.sessions
    if asked is None:
        return
    for context in plan.question.contexts:
        row = plan.row(context, plan.question.kv_format)
        what = f"{asked} sessions of {context} tokens, {row.kv_format}, blocks of {row.block_size}"
        fit = row.sessions or 0
        fits = fit >= asked
        yield Verdict(what, fits, f"{fit} fit", () if fits else tuple(_remedies(plan, context, asked)))


def _remedies(plan: Plan, context: int, asked: int) -> Iterator[str]:
    """What would hold the sessions that are asked for."""
    rows = [row for row in plan.formats if row.context == context and (row.sessions or 0) >= asked]
    yield from (f"kv_format {row.kv_format} holds {row.sessions}, {loss_text(plan, row.loss)}" for row in rows)
    dropping = [row for row in plan.evictions if row.context == context and (row.sessions or 0) >= asked]
    if dropping:
        row = min(dropping, key=lambda row: math.inf if row.loss is None else row.loss)
        cost = loss_text(plan, row.loss)
        yield f"eviction {row.eviction} with keep_tokens {row.keep_tokens} holds {row.sessions}, {cost}"
    needed = pool_bytes_for(plan.groups, held_by(plan, context, setting_of(plan)), asked, plan.question.watermark)
    if needed is None:
        yield "no pool of one engine holds that many; share them between several engines"
        return
    if plan.question.host_pool_bytes:
        needed = -(-needed * STAGING_PART // (STAGING_PART - 1))
    memory = plan.memory
    total = memory.runtime + memory.weights + memory.packed + int(needed / (GPU_SHARE if plan.machine.is_gpu else 1))
    yield f"a KV pool of {format_size(needed)}"
    yield from _devices(total)
    row = plan.row(context, plan.question.kv_format)
    if row.host_sessions is None and plan.layout is not None:
        short = (asked - (row.sessions or 0)) * row.session_bytes
        yield f"a host pool of {format_size(short)} for those that wait (--host-pool-bytes, host_offload on)"


def _devices(needed: int) -> Iterator[str]:
    """GPUs whose data sheet has enough memory, the smallest."""
    enough = sorted((sheet.memory_bytes, name) for name, sheet in DEVICES.items() if sheet.memory_bytes >= needed)
    if enough:
        size, name = enough[0]
        yield f"{name} ({format_size(size)}), or any GPU with {format_size(needed)}"
    else:
        yield f"a GPU with {format_size(needed)}: none of {', '.join(DEVICES)}, and one engine runs on one GPU"


def _processor(plan: Plan) -> Verdict:
    cores, needed = plan.machine.cores, cores_needed()
    estimate = f"an engine wants {needed} cores (estimated): one for its steps, one for HTTP"
    if not plan.machine.is_gpu:
        estimate += "; on a processor every further core makes steps shorter"
    if cores is None:
        return Verdict("processor", None, f"{estimate}; say how many there are with --cpu")
    fits = cores >= needed
    remedies = () if fits else (f"{needed} cores; with fewer, requests wait for each other's HTTP",)
    return Verdict("processor", fits, f"{cores} cores; {estimate}", remedies)


def _host(plan: Plan) -> Verdict:
    needed, there = host_bytes_needed(plan.machine, plan.memory), plan.machine.host_bytes
    text = f"about {format_size(needed)} wanted (estimated)"
    if plan.memory.host_pool:
        text += f", {format_size(plan.memory.host_pool)} of it the host pool"
    if there is None:
        return Verdict("host memory", None, f"{text}; say how much there is with --host-memory")
    fits = there >= needed
    remedies = [] if fits else [f"{format_size(needed)} of host memory"]
    spare = there - needed + plan.memory.host_pool
    if not fits and plan.memory.host_pool and spare > 0:
        remedies.append(f"--host-pool-bytes {spare}")
    return Verdict("host memory", fits, f"{format_size(there)}; {text}", tuple(remedies))


def loss_text(plan: Plan, loss: float | None) -> str:
    """A loss for people, marked where nothing of this model was measured."""
    if loss is None:
        return "loss not measured"
    mark = " (estimated)" if plan.losses.is_estimated and loss else ""
    return f"loses {loss:.2%}{mark}" if loss else "loses nothing"
