"""Which kind of engine answers, and the adapter for it. The only place that knows all of them."""

from __future__ import annotations

from typing import Final

from autotune.adapters.http_engine import HttpEngine
from autotune.adapters.kinds import EngineKind
from autotune.adapters.llamacpp import LLAMACPP
from autotune.adapters.page import Page
from autotune.adapters.sglang import SGLANG
from autotune.adapters.vllm import VLLM
from autotune.adapters.web import Web
from engine.clock import Clock
from engine.control_client import EngineUnreachable

KINDS: Final = {kind.name: kind for kind in (VLLM, SGLANG, LLAMACPP)}
_OURS: Final = "autotune_engine_"


def adapter_of(name: str, url: str, clock: Clock, *, timeout_s: float = 2.0) -> HttpEngine:
    """An adapter for the engine at ``url``: of the kind named, or, for ``auto``, of what its page shows.

    Raises ValueError for an address that is none, a name that nobody has, or our own engine, which changes live; and
    for ``auto`` EngineUnreachable when nobody answers or nothing known does.
    """
    web = Web(url, timeout_s)
    if name == "auto":
        return HttpEngine(kind_at(web), web, clock)
    if name not in KINDS:
        raise ValueError(f"{name!r} is no engine; known: {', '.join(KINDS)}, or auto")
    return HttpEngine(KINDS[name], web, clock)


def kind_at(web: Web) -> EngineKind:
    """By the names on its metrics page. Raises as :func:`adapter_of` does."""
    text = web.text("/metrics")
    try:
        page = Page(text)
    except ValueError as error:
        raise EngineUnreachable(f"{web.url}/metrics: not a Prometheus page") from error
    found = [kind for kind in KINDS.values() if page.has_prefix(kind.names.prefix)]
    if len(found) == 1:
        return found[0]
    if page.has_prefix(_OURS):
        raise ValueError(f"{web.url} is an engine of ours, whose settings change live: run autotune daemon beside it")
    known = ", ".join(f"{kind.name} ({kind.names.prefix}...)" for kind in KINDS.values())
    shown = "figures of several engines" if found else "no figure of a known engine"
    raise EngineUnreachable(f"{web.url}/metrics has {shown}; known: {known}; name one with --engine")
