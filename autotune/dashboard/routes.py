"""Where the built-in page is served: its files, and one JSON document that it asks for every few seconds.

Nothing here changes anything: orders are in :mod:`autotune.admin_actions` and need the token. Figures, names and
reasons are data; the page's own code makes text of them and never markup, and its policy keeps any other code out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from autotune.dashboard.plots import EVERY_S, FORMATS, OTHER_FORMATS, SIZE, PlotHistory
from autotune.decisions import DecisionLog
from autotune.jsonable import finite
from autotune.metrics import MODES
from engine.tunables import CostClass, Tunable

PAGE: Final = "index.html"
MOST_DECISIONS: Final = 100
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Only files of this server, no script or style inside the page, no form that a browser would send by itself, no frame.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_MOST_DIGITS: Final = 15


def dashboard_routes(
    plots: PlotHistory,
    decisions: DecisionLog,
    status: Callable[[], Mapping[str, Any]],
    *,
    wall_s: Callable[[], float],
    process: str,
    knobs: Mapping[str, Tunable],
) -> list[Route]:
    """``GET /``, ``/dashboard/FILE``, ``/dashboard/about`` and ``/dashboard/data?process=&after=&decisions=``.

    ``about``: what never changes while this process runs, the engine's ``knobs`` among it. ``data``: what is newer than
    the page has: points after number ``after`` and, unless their version still is ``decisions``, the newest decisions;
    all of it for a page that has seen another ``process``. Answers 400 for numbers that are none.
    """
    static = _static()
    about = json.dumps(_about(knobs))

    async def page(_: Request) -> Response:
        return static[PAGE]

    async def asset(request: Request) -> Response:
        return static.get(request.path_params["name"]) or JSONResponse({"error": "no such file"}, status_code=404)

    async def tell_about(_: Request) -> Response:
        return _json(about)

    async def data(request: Request) -> Response:
        query = request.query_params
        numbers = [_number(query.get(name, "0")) for name in ("after", "decisions")]
        if None in numbers:
            return JSONResponse({"error": "after and decisions are whole numbers"}, status_code=400)
        after, version = numbers if query.get("process") == process else (0, 0)
        rows = None
        if (now := decisions.version) != version:
            rows = [record.to_json() for record in decisions.recent(MOST_DECISIONS)]
        document = {
            "process": process,
            "now_s": wall_s(),
            "status": {name: value for name, value in status().items() if name != "values"},
            "decisions": {"version": now, "rows": rows},
        }
        return _json(f'{json.dumps(finite(document))[:-1]},"points":{plots.json_since(after or 0)}}}')

    return [
        Route("/", page, methods=["GET"]),
        Route("/dashboard/about", tell_about, methods=["GET"]),
        Route("/dashboard/data", data, methods=["GET"]),
        Route("/dashboard/{name}", asset, methods=["GET"]),
    ]


def _static() -> dict[str, Response]:
    """Every file by name, read once."""
    folder = files("autotune.dashboard") / "static"
    return {
        file.name: Response(
            file.read_bytes(), headers={**HEADERS, "content-type": _TYPES[PurePosixPath(file.name).suffix]}
        )
        for file in folder.iterdir()
        if PurePosixPath(file.name).suffix in _TYPES
    }


def _about(knobs: Mapping[str, Tunable]) -> dict[str, Any]:
    return {
        "size": SIZE,
        "every_s": EVERY_S,
        "modes": MODES,
        "formats": {**FORMATS, "other": OTHER_FORMATS},
        "knobs": {
            name: {
                "values": tunable.values,
                "unit": tunable.unit,
                "description": tunable.description,
                "can_be_set": tunable.cost_class is not CostClass.RESTART,
            }
            for name, tunable in knobs.items()
        },
    }


def _json(text: str) -> Response:
    return Response(
        text, headers={**HEADERS, "cache-control": "no-store", "content-type": "application/json; charset=utf-8"}
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None
