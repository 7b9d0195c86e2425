"""``autotune mode`` and ``autotune reload``: orders to a running daemon, over its admin port, with its token."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli._shared import (
    AdminOption,
    CliError,
    ConfigOption,
    admin_address,
    configured,
    given_path,
    journal_path,
)
from engine.json_text import load_json
from engine.text import one_line, trouble

_MODES = {"act": "active", "active": "active", "advise": "advise", "off": "off"}
_TIMEOUT_S = 15
EXIT_NEEDS_RESTART = 3

TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The daemon's token; the configuration's, or the one beside its journal, if absent.",
        show_default=False,
        parser=given_path,
    ),
]


def register(app: typer.Typer) -> None:
    app.command("mode", short_help="Switch a running daemon between active, advise and off.")(mode)
    app.command("reload", short_help="Have a running daemon read its configuration again.")(reload)


def mode(
    wanted: Annotated[
        str, typer.Argument(metavar="active|advise|off", help="active, or act, writes; advise does all but the write.")
    ],
    admin: AdminOption = None,
    token_file: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Switch a running daemon's mode. It holds over restarts, until another order or a reload that changes `mode`."""
    if wanted not in _MODES:
        raise CliError(f"mode {wanted!r}: choose active, advise or off", 2)
    address = admin_address(admin, config)
    typer.echo(_line(_order(address, _token(token_file, config), "mode", {"mode": _MODES[wanted]})))


def reload(admin: AdminOption = None, token_file: TokenOption = None, config: ConfigOption = None) -> int:
    """Have a running daemon read its configuration file again: all of it is taken or nothing.

    Exit code 1 if it was refused, 3 if some of it only holds after a restart of the daemon.
    """
    answer = _order(admin_address(admin, config), _token(token_file, config), "reload", {})
    typer.echo(_line(answer))
    return EXIT_NEEDS_RESTART if answer.get("needs_restart") else 0


def _token(named: Path | None, config: Path | None) -> str:
    from autotune.admin_token import TokenError, read_token, token_beside  # noqa: PLC0415

    known = configured(config) if named is None else None
    named = named if known is None else known.admin.token_file
    try:
        return read_token(named or token_beside(journal_path(None, config)))
    except TokenError as error:
        raise CliError(f"{error}; name the daemon's with --token-file or --config") from error


def _order(admin: str, token: str, name: str, body: dict[str, str]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    address = f"{admin}/control/{name}"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers, method="POST")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # http only
            document: dict[str, Any] = load_json(answer.read())
            _line(document)
            return document
    except urllib.error.HTTPError as error:
        raise CliError(_refusal(error)) from error
    except (OSError, ValueError, HTTPException, KeyError, TypeError) as error:
        raise CliError(
            f"no daemon answers at {admin} ({trouble(error)}); start one, or name its address with --admin"
        ) from error


def _line(answer: dict[str, Any]) -> str:
    return one_line(answer["answer"], 1000)


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return one_line(load_json(error.read())["error"], 1000)
    except (OSError, ValueError, HTTPException, KeyError, TypeError):
        return f"the daemon refused (status {error.code})"
