"""Makes a plan: memory by format, block size and eviction, and sessions that fit. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.planning.losses import Losses
from autotune.planning.machine import Machine, Memory, share_out
from autotune.planning.plan import Plan, Question, Row
from autotune.planning.steps import decode_step_s
from engine.errors import EngineError
from engine.footprint import Blocks, Setting, blocks_bytes, sequence_blocks, sequences_that_fit, spare_slabs
from engine.formats import BLOCK_SIZES, FORMATS, NATIVE
from engine.memory_model import GroupSpec, PoolLayout, bytes_by_format, host_layout, pool_layout
from engine.models.config import ModelConfig
from engine.models.dtypes import DTYPE_BYTES, resolve_dtype
from engine.models.groups import layer_groups
from engine.models.parameters import count_parameters
from engine.tunables import TUNABLES
from envs.latency_model import LatencyModel

_USUAL_CONTEXTS = (2048, 8192, 32_768)
_MOST_SESSIONS = max(value for value in TUNABLES["max_num_seqs"].values if isinstance(value, int))


def make_plan(
    config: ModelConfig,
    name: str,
    machine: Machine,
    question: Question,
    losses: Losses,
    latency: LatencyModel | None = None,
    step_source: str = "",
) -> Plan:
    """``latency``: what steps cost, from ``step_source``.

    Raises EngineError for a question that makes no sense for this model.
    """
    question = _checked(config, question)
    dtype = resolve_dtype(question.dtype, config.dtype)
    element_bytes = DTYPE_BYTES[dtype]
    groups = layer_groups(config, element_bytes, question.protect_layers)
    parameters = count_parameters(config)
    memory = share_out(machine, parameters, element_bytes, question.kv_pool_bytes, question.host_pool_bytes)
    layout, host, problem = _layouts(groups, memory, machine)
    found = Plan(
        model=name,
        architecture=config.architecture,
        dtype=dtype,
        max_model_len=config.max_model_len,
        parameters=parameters,
        question=question,
        machine=machine,
        memory=memory,
        groups=groups,
        layout=layout,
        host=host,
        problem=problem,
        token_bytes=bytes_by_format(groups),
        losses=losses,
        step_source=step_source,
    )
    for context in question.contexts:
        found.formats.extend(_row(found, context, kv_format=kind.name, latency=latency) for kind in FORMATS)
    context = found.main_context
    found.block_sizes.extend(_row(found, context, block_size=size, latency=latency) for size in BLOCK_SIZES)
    found.evictions.extend(_evictions(found, context))
    return found


def _checked(config: ModelConfig, question: Question) -> Question:
    most = config.max_model_len
    wrong = [context for context in question.contexts if not 1 <= context <= most]
    if wrong:
        raise EngineError(f"--context {wrong[0]}: {config.architecture} of this file takes 1 to {most} tokens")
    if not 0 <= question.protect_layers <= config.num_layers:
        raise EngineError(f"--protect-layers {question.protect_layers}: this model has {config.num_layers} layers")
    contexts = question.contexts or tuple(context for context in _USUAL_CONTEXTS if context <= most) or (most,)
    return replace(question, contexts=tuple(sorted(set(contexts))))


def _layouts(
    groups: Sequence[GroupSpec], memory: Memory, machine: Machine
) -> tuple[PoolLayout | None, PoolLayout | None, str]:
    """How pool and host pool are cut, or why there is none."""
    if memory.free <= 0:
        return None, None, f"the weights do not fit {machine.device}"
    try:
        layout = pool_layout(groups, memory.pool - memory.staging)
        host = host_layout(layout, memory.host_pool) if memory.host_pool else None
    except ValueError as error:
        return None, None, str(error)
    return layout, host, ""


def held_by(plan: Plan, context: int, setting: Setting) -> list[Blocks]:
    """Blocks of one session, by layer group."""
    return [sequence_blocks(group, context, setting) for group in plan.groups]


def sessions_in(plan: Plan, held: Sequence[Blocks]) -> int | None:
    """Sessions that the pool holds at once, None where there is no pool."""
    if plan.layout is None:
        return None
    spare = spare_slabs(plan.layout, plan.question.watermark)
    return sequences_that_fit(plan.groups, plan.layout, held, spare_slabs=spare)


def setting_of(plan: Plan, kv_format: str | None = None, block_size: int | None = None) -> Setting:
    """A setting, where nothing else is said the one that was asked for."""
    question = plan.question
    return Setting(kv_format or question.kv_format, block_size or question.block_size, question.recent_tokens)


def _row(
    plan: Plan,
    context: int,
    *,
    kv_format: str | None = None,
    block_size: int | None = None,
    latency: LatencyModel | None = None,
) -> Row:
    setting = setting_of(plan, kv_format, block_size)
    held = held_by(plan, context, setting)
    native = blocks_bytes(plan.groups, held_by(plan, context, replace(setting, kv_format=NATIVE.name)))
    size, sessions = blocks_bytes(plan.groups, held), sessions_in(plan, held)
    at = min(sessions or 0, plan.question.sessions or _MOST_SESSIONS)
    step_s = decode_step_s(latency, plan.groups, held, at, context) if latency is not None and at else None
    return Row(
        setting.kv_format,
        setting.block_size,
        "none",
        None,
        context,
        size,
        sessions,
        None if plan.host is None else sequences_that_fit(plan.groups, plan.host, held, spare_slabs=0),
        1 - size / native,
        plan.losses.by_format.get(setting.kv_format),
        at or None,
        step_s,
    )


def _evictions(plan: Plan, context: int) -> Iterable[Row]:
    """Every way of evicting that would drop anything of the context, in the format that was asked for."""
    setting, sinks = setting_of(plan), plan.question.sinks
    whole = blocks_bytes(plan.groups, held_by(plan, context, setting))
    for way in TUNABLES["eviction"].values:
        for keep in TUNABLES["keep_tokens"].values:
            kept = sinks + int(keep)
            if way == TUNABLES["eviction"].default or kept >= context:
                continue
            held = held_by(plan, kept, setting)
            size, cost = blocks_bytes(plan.groups, held), plan.losses.by_eviction.get(str(way))
            stored = plan.losses.by_format.get(setting.kv_format)
            dropped = 1 - kept / context
            loss = None if cost is None or stored is None else (1 - dropped) * stored + dropped * cost
            yield Row(
                setting.kv_format, setting.block_size, str(way), int(keep), context, size, sessions_in(plan, held),
                None, 1 - size / whole, loss,
            )  # fmt: skip
