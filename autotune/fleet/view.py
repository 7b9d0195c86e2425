"""The fleet for people and programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from rich.table import Table

from autotune.fleet.rows import Row
from engine.text import one_line

_UNKNOWN: Final = "?"
_COLUMNS: Final = (
    "engine",
    "health",
    "mode",
    "load",
    "KV",
    "stored as",
    "run/wait",
    "TTFT p95",
    "TBT p95",
    "last decision",
)
_SHORT: Final = 1 / 200  # a share below half a per cent is not worth a place
_MOST_CHARS: Final = 60


def table(rows: Sequence[Row], title: str = "") -> Table:
    """One line per engine; what is unknown is a question mark, a missed target has an exclamation mark."""
    drawn = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    for name in _COLUMNS:
        drawn.add_column(name, justify="right" if name in {"load", "KV", "run/wait", "TTFT p95", "TBT p95"} else "left")
    for row in rows:
        drawn.add_row(*(one_line(cell, _MOST_CHARS) for cell in _cells(row)), style=None if row.is_well else "bold red")
    return drawn


def _cells(row: Row) -> list[str]:
    health = row.health if row.daemon != "down" else "daemon down"
    mode = row.mode or ("no daemon" if row.daemon == "none" else _UNKNOWN)
    return [
        row.name,
        health,
        mode,
        _share(row.load),
        _share(row.kv_usage),
        _stored(row),
        f"{_count(row.running)}/{_count(row.waiting)}",
        _tail(row.ttft_s, row.ttft_target_s),
        _tail(row.tbt_s, row.tbt_target_s),
        _decided(row),
    ]


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0%}"


def _count(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}"


def _stored(row: Row) -> str:
    """The format in force, and shares where the pool holds others."""
    others = {name: share for name, share in row.kv_shares.items() if share >= _SHORT}
    if set(others) <= {row.kv_format}:
        return row.kv_format or _UNKNOWN
    mixed = " ".join(f"{name} {share:.0%}" for name, share in others.items())
    return f"{row.kv_format or _UNKNOWN} ({mixed})"


def _tail(value: float | None, target: float | None) -> str:
    if value is None:
        return _UNKNOWN
    text = _time(value)
    if target is None:
        return text
    return f"{text} of {_time(target)}{'!' if value > target else ''}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _decided(row: Row) -> str:
    if row.daemon == "none":
        return "-"
    if row.last_decision is None:
        return "none of late"
    last = row.last_decision
    return f"{last.knob} {last.to} ({last.scenario}), {_age(last.age_s)} ago"


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def summary(rows: Sequence[Row]) -> str:
    """One line over all."""
    unwell = [row.name for row in rows if not row.is_well]
    missing = [row.name for row in rows if row.misses]
    parts = [f"{len(rows)} engine(s)"]
    parts.append(f"not well: {', '.join(unwell)}" if unwell else "all well")
    if missing:
        parts.append(f"over target: {', '.join(missing)}")
    bare = sum(row.daemon == "none" for row in rows)
    if bare:
        parts.append(f"{bare} without a daemon")
    return one_line("; ".join(parts))


def document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """JSON-able; null is unknown."""
    return [{**dataclasses.asdict(row), "is_well": row.is_well, "misses": row.misses} for row in rows]
