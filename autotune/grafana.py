"""The Grafana dashboard over the daemon's and the engine's metrics, as JSON; ``python -m autotune.docs`` writes it.

Panels are declared in grafana_panels.yaml; tests hold every metric and label in them against what is really served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from autotune.grafana_panels import Panel, Row, rows

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_SCHEMA_VERSION: Final = 39  # Grafana 11
_MADE: Final = 'autotune_decisions_total{job="$job", instance=~"$instance", verdict=~"applied|converging"}'
# A series of decisions begins at 1, so that increase() alone would miss the first one.
_DECIDED: Final = (
    f"sum by (instance, knob, to, scenario, writer) ((increase({_MADE}[1m]) > 0) or ({_MADE} unless {_MADE} offset 1m))"
)


@dataclass(frozen=True)
class _Place:
    x: int
    y: int
    width: int
    height: int

    def to_json(self) -> dict[str, int]:
        return {"x": self.x, "y": self.y, "w": self.width, "h": self.height}


def dashboard_json() -> str:
    """The dashboard's file, ending in a newline."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def dashboard() -> dict[str, Any]:
    """The dashboard: rows of panels, choice of Prometheus, job and instance, and decisions as annotations."""
    return {
        "uid": "kv-autotune",
        "title": "kv-autotune",
        "description": "An engine's KV cache, its load and latency, and what the daemon does about them.",
        "tags": ["kv-autotune", "inference"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_annotation("Decisions", _DECIDED, "purple")]},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _annotation(name: str, expression: str, color: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": color,
        "expr": expression,
        "step": "15s",
        "titleFormat": "{{knob}} -> {{to}}",
        "textFormat": "{{scenario}}, by {{writer}} at {{instance}}",
        "tagKeys": "knob,scenario",
        "useValueForTime": False,
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, label, query, is_many in (
        ("job", "Daemons' job", "label_values(autotune_mode, job)", False),
        ("instance", "Daemon", 'label_values(autotune_mode{job="$job"}, instance)', True),
        ("engine", "Engine", "label_values(autotune_engine_info, instance)", True),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": is_many,
            "includeAll": is_many,
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for row in rows():
        yield _row(number, y, row)
        number, y, x, height = number + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y, height = 0, y + height, 0
            yield _panel(number, _Place(x, y, panel.width, panel.height), panel)
            number, x, height = number + 1, x + panel.width, max(height, panel.height)
        y += height


def _row(number: int, y: int, row: Row) -> dict[str, Any]:
    place = _Place(0, y, _COLUMNS, 1).to_json()
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, place: _Place, panel: Panel) -> dict[str, Any]:
    instant = panel.kind in {"stat", "table"}
    defaults: dict[str, Any] = {"unit": panel.unit, "noValue": "unknown"}
    if panel.most is not None:
        defaults |= {"min": 0, "max": panel.most}
    elif panel.kind == "timeseries":
        defaults["min"] = 0
    if panel.kind == "timeseries":
        defaults["custom"] = _drawing(panel)
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place.to_json(),
        "fieldConfig": {"defaults": defaults, "overrides": [_limit(name) for name in panel.limits]},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
                **({"format": "table"} if panel.kind == "table" else {}),
            }
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _drawing(panel: Panel) -> dict[str, Any]:
    return {
        "lineWidth": 2,
        "fillOpacity": 60 if panel.stacked else 0,
        "spanNulls": False,  # unknown is a gap
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": 10} if panel.log else {"type": "linear"},
        "drawStyle": "bars" if panel.bars else "line",
    }


def _limit(name: str) -> dict[str, Any]:
    """A dashed line that is neither filled nor stacked, for series of this name."""
    dashes = {"fill": "dash", "dash": [8, 6]}
    return {
        "matcher": {"id": "byRegexp", "options": f"/^{name}/"},
        "properties": [
            {"id": "custom.lineStyle", "value": dashes},
            {"id": "custom.fillOpacity", "value": 0},
            {"id": "custom.stacking", "value": {"mode": "none", "group": "B"}},
            {"id": "color", "value": {"mode": "fixed", "fixedColor": "text"}},
        ],
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        calculation = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": calculation, "textMode": "value_and_name", "colorMode": "none"}
    if panel.kind == "table":
        return {"showHeader": True, "cellHeight": "sm"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
