"""``autotune audit``: have a running engine recount its cache."""

from __future__ import annotations

import typer

from autotune.cli._shared import CliError, ConfigOption, ControlOption, connect
from engine.text import one_line

_PATIENCE_S = 60.0


def register(app: typer.Typer) -> None:
    app.command("audit", short_help="Have the engine recount its cache.")(audit)


def audit(control: ControlOption = None, config: ConfigOption = None) -> None:
    """Have a running engine check its cache's books against each other; exit code 1 when they disagree.

    It happens between two steps, and every request waits for it: milliseconds for a small cache, seconds for a large.
    """
    with connect(control, config, timeout_s=_PATIENCE_S) as client:
        found = client.audit()
    if found["problem"] is not None:
        raise CliError(f"the cache's books disagree: {one_line(found['problem'], 500)}")
    typer.echo(f"the cache's books agree ({found['took_s'] * 1e3:.1f} ms)")
