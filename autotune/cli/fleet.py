"""``autotune fleet``: every engine and daemon that one Prometheus watches, a line each."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli._shared import CliError, console_for_stdout, given_path

if TYPE_CHECKING:
    from autotune.fleet.rows import Row


def register(app: typer.Typer) -> None:
    app.command("fleet", short_help="Show all engines that a Prometheus watches.")(fleet)


def fleet(
    *,
    prometheus: Annotated[str, typer.Option(metavar="URL", help="The Prometheus server.")] = "http://127.0.0.1:9090",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A bearer's token for it.", parser=given_path)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON; a line for each look.")] = False,
) -> int:
    """Show load, KV, latency tails against targets, mode and the last decision of every engine.

    A question mark is unknown, an exclamation mark a missed target. Exit code 1 when an engine or its daemon is not
    well, or when there is none.
    """
    from autotune.fleet.prometheus import Prometheus, PrometheusError  # noqa: PLC0415  # not for --help
    from autotune.fleet.read import read_fleet  # noqa: PLC0415

    try:
        with Prometheus(prometheus, token=_token(token_file)) as server:
            while True:
                rows = read_fleet(server)
                _show(rows, server.url, as_json=as_json, watch=watch)
                if not watch:
                    break
                time.sleep(every)
    except PrometheusError as error:
        raise CliError(str(error)) from error
    return int(not rows or not all(row.is_well for row in rows))


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise CliError(f"--token-file {path}: {getattr(error, 'strerror', None) or 'not ASCII text'}") from error
    if not token or not token.isprintable() or " " in token:
        raise CliError(f"--token-file {path}: holds no token")
    return token


def _show(rows: list[Row], url: str, *, as_json: bool, watch: bool) -> None:
    from autotune.fleet.view import document, summary, table  # noqa: PLC0415

    if as_json:
        typer.echo(json.dumps(document(rows), indent=None if watch else 2))
        return
    console = console_for_stdout()
    if watch and console.is_terminal:
        console.clear()
    if not rows:
        typer.echo(f"{url} knows no engine and no daemon; does it scrape their /metrics? (docs/fleet.md)")
        return
    console.print(table(rows))
    typer.echo(summary(rows))
