"""Finds the rows: every module in ``engine.cache_bench.rows`` is one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from engine.cache_bench import rows
from engine.cache_bench.context import Context


@dataclass(frozen=True)
class Row:
    """A measurement. ``keys``: what ``run`` returns, no more and no less."""

    name: str
    keys: tuple[str, ...]
    run: Callable[[Context], dict[str, object]]


def row_names(package: ModuleType = rows) -> list[str]:
    """Names of all rows, in the order in which they run."""
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def load_rows(names: Sequence[str] = (), package: ModuleType = rows) -> list[Row]:
    """The named rows, or all. Raises ValueError for an unknown name, or for a key that two rows claim."""
    known = row_names(package)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no row is called {unknown[0]!r}; there are {', '.join(known)}")
    found: list[Row] = []
    owner: dict[str, str] = {}
    for name in names or known:
        module = importlib.import_module(f"{package.__name__}.{name}")
        row = Row(name, tuple(module.KEYS), module.run)
        for key in row.keys:
            if owner.setdefault(key, name) != name:
                raise ValueError(f"rows {owner[key]} and {name} both yield {key}")
        found.append(row)
    return found
