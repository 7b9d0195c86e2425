"""The panels of the Grafana dashboard, read from grafana_panels.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from policies.strict_yaml import load_strict

_CHOSEN: Final = {"@daemon": 'job="$job", instance=~"$instance"', "@engine": 'instance=~"$engine"'}


@dataclass(frozen=True)
class Panel:
    """One panel; ``queries``: expressions of PromQL by how their series are called. For the rest see the file."""

    title: str
    unit: str
    description: str
    queries: Mapping[str, str]
    kind: str = "timeseries"
    limits: tuple[str, ...] = ()
    most: float | None = None
    stacked: bool = False
    log: bool = False
    bars: bool = False
    width: int = 8
    height: int = 8


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def rows() -> list[Row]:
    """All of them, in order. Raises TypeError for a panel with unknown or missing keys."""
    text = (files("autotune") / "grafana_panels.yaml").read_text(encoding="utf-8")
    return [Row(row["title"], tuple(map(_panel, row["panels"]))) for row in load_strict(text)]


def _panel(data: Mapping[str, Any]) -> Panel:
    queries = {legend: _expanded(expression) for legend, expression in data["queries"].items()}
    return Panel(**{**data, "queries": queries, "limits": tuple(data.get("limits", ()))})


def _expanded(expression: str) -> str:
    for short, selector in _CHOSEN.items():
        expression = expression.replace(short, selector)
    return expression
