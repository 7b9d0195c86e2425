"""A plan for people and programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from autotune.planning.plan import Plan, Row
from autotune.planning.verdicts import Verdict, loss_text
from engine.sizes import format_size

_MARKS = {True: "fits", False: "DOES NOT FIT", None: "not told"}


def show(plan: Plan, verdicts: list[Verdict], console: Console) -> None:
    """Print it."""
    for line in _head(plan):
        console.print(line, markup=False, soft_wrap=True)
    asked = plan.question
    tables: tuple[tuple[str, list[Row], Callable[[Row], str]], ...] = (
        (f"formats, blocks of {asked.block_size}", plan.formats, lambda row: row.kv_format),
        (f"block sizes, {asked.kv_format}", plan.block_sizes, lambda row: f"blocks of {row.block_size}"),
        (f"eviction, {asked.kv_format}", plan.evictions, lambda row: f"{row.eviction} {row.keep_tokens}"),
    )
    for title, rows, label in tables:
        if rows:
            console.print(_table(plan, title, rows, label))
    for verdict in verdicts:
        console.print(f"{verdict.what}: {_MARKS[verdict.fits]}: {verdict.found}", markup=False, soft_wrap=True)
        for remedy in verdict.remedies:
            console.print(f"  would do: {remedy}", markup=False, soft_wrap=True)


def _head(plan: Plan) -> Iterator[str]:
    memory, parameters = plan.memory, plan.parameters
    tied = "" if parameters.head else ", embedding and head tied"
    yield (
        f"{plan.model}: {plan.architecture}, {parameters.total:,} parameters{tied}, {format_size(memory.weights)} "
        f"({memory.weights:,} bytes) in {plan.dtype}, up to {plan.max_model_len:,} tokens"
    )
    if memory.packed:
        yield f"a processor keeps a packed second copy of so small a model: about {format_size(memory.packed)}"
    windows = {group.window for group in plan.groups if group.window is not None}
    if windows:
        sizes = ", ".join(map(str, sorted(windows)))
        yield f"layers with an attention window keep no more KV than that: {sizes} tokens"
    per_token = ", ".join(f"{name} {size:,.0f}" for name, size in plan.token_bytes.items())
    yield f"KV bytes per token: {per_token}"
    yield (
        f"{plan.machine.device}: {format_size(memory.total)}; KV pool {format_size(memory.pool)}"
        + (f", of it {format_size(memory.staging)} to stream from the host" if memory.staging else "")
        + (f", in {plan.layout.num_slabs} slabs of {plan.layout.slab_tokens} tokens" if plan.layout else "")
    )
    yield f"quality: relative increase of perplexity, {plan.losses.source}"
    if plan.step_source:
        yield f"decode step: {plan.step_source}"


def _table(plan: Plan, title: str, rows: list[Row], label: Callable[[Row], str]) -> Table:
    has_step = any(row.step_s is not None for row in rows)
    has_host = any(row.host_sessions is not None for row in rows)
    table = Table(box=None, title=title, title_justify="left", pad_edge=False)
    for name in ("setting", "context", "a session", "fit", *(["host"] if has_host else []), "saves", "costs"):
        table.add_column(name, justify="left" if name in {"setting", "costs"} else "right", no_wrap=True)
    if has_step:
        table.add_column("decode step", justify="right", no_wrap=True)
    for row in rows:
        cells = [
            label(row),
            f"{row.context:,}",
            format_size(row.session_bytes),
            "-" if row.sessions is None else f"{row.sessions:,}",
        ]
        if has_host:
            cells.append("-" if row.host_sessions is None else f"{row.host_sessions:,}")
        cells += [f"{row.saved:.0%}", loss_text(plan, row.loss)]
        if has_step:
            known = row.step_s is not None
            cells.append(f"{(row.step_s or 0) * 1e3:.1f} ms with {row.step_sessions}" if known else "-")
        table.add_row(*cells)
    return table


def document(plan: Plan, verdicts: list[Verdict]) -> dict[str, Any]:
    """All of it as JSON-able values; sizes in bytes, times in seconds, losses and savings as shares."""
    layout = plan.layout
    return {
        "kind": "kv-autotune plan",
        "version": 1,
        "model": {
            "name": plan.model,
            "architecture": plan.architecture,
            "dtype": plan.dtype,
            "max_model_len": plan.max_model_len,
            "parameters": plan.parameters.total,
            "weight_bytes": plan.memory.weights,
            "kv_bytes_per_token": plan.token_bytes,
        },
        "machine": {
            "device": plan.machine.device,
            "memory_bytes": plan.machine.memory_bytes,
            "host_bytes": plan.machine.host_bytes,
            "cores": plan.machine.cores,
        },
        "memory": {
            **{name: value for name, value in dataclasses.asdict(plan.memory).items() if name != "is_host_apart"},
            "left": plan.memory.left,
        },
        "pool": None if layout is None else {
            "num_slabs": layout.num_slabs,
            "slab_tokens": layout.slab_tokens,
            "arena_bytes": plan.arena_bytes,
            "host_arena_bytes": plan.host_arena_bytes,
        },
        "problem": plan.problem or None,
        "quality": {"source": plan.losses.source, "estimated": plan.losses.is_estimated},
        "step_source": plan.step_source or None,
        "question": dataclasses.asdict(plan.question),
        "formats": [dataclasses.asdict(row) for row in plan.formats],
        "block_sizes": [dataclasses.asdict(row) for row in plan.block_sizes],
        "evictions": [dataclasses.asdict(row) for row in plan.evictions],
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        "fits": all(verdict.fits is not False for verdict in verdicts),
    }  # fmt: skip
