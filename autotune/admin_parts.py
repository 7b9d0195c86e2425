"""The admin port of a daemon, put together: what it shows to anybody, and what it does for who has the token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from autotune.admin import AdminServer, admin_app
from autotune.admin_actions import Action, action_routes
from autotune.admin_token import own_token, token_beside
from autotune.commands import Commands
from autotune.dashboard.routes import dashboard_routes
from autotune.overrides import override_actions
from autotune.parts import Parts
from autotune.schema import AdminSection


def admin_server(
    section: AdminSection,
    parts: Parts,
    registry: CollectorRegistry,
    status: Callable[[], Mapping[str, Any]],
    actions: Mapping[str, Action],
    commands: Commands,
    *,
    process: str,
) -> AdminServer:
    """The server, not yet started; its port is taken. ``actions``: the daemon's own, besides those on knobs.

    ``process`` tells one daemon process from the next. Raises AdminError and TokenError.
    """
    given = section.token_file
    token = own_token(given or token_beside(parts.journal.path), make=given is None)
    orders = action_routes({**actions, **override_actions(parts)}, commands, token)
    page = dashboard_routes(
        parts.plots,
        parts.decisions,
        status,
        wall_s=parts.clock.wall_s,
        process=process,
        knobs=parts.metrics.tunables,
    )
    return AdminServer(admin_app(registry, parts.decisions, status, [*page, *orders]), section.host, section.port)
