"""``autotune mode`` and ``autotune reload``: orders to a running daemon, over its admin port, with its token."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli._shared import CliError, ConfigOption, given_path, journal_path
from autotune.cli.status import DEFAULT_ADMIN
from engine.text import one_line

_MODES = {"act": "active", "active": "active", "advise": "advise", "off": "off"}
_TIMEOUT_S = 15

AdminOption = Annotated[str, typer.Option("--admin", metavar="URL", help="Admin address of the daemon.")]
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
    app.command("mode", short_help="Switch a running daemon between act, advise and off.")(mode)
    app.command("reload", short_help="Have a running daemon read its configuration again.")(reload)


def mode(
    wanted: Annotated[str, typer.Argument(metavar="act|advise|off", help="act writes, advise does all but the write.")],
    admin: AdminOption = DEFAULT_ADMIN,
    token_file: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Switch a running daemon's mode. It holds over restarts, until another order or a reload that changes `mode`."""
    if wanted not in _MODES:
        raise CliError(f"mode {wanted!r}: choose act, advise or off", 2)
    typer.echo(_order(admin, _token(token_file, config), "mode", {"mode": _MODES[wanted]}))


def reload(admin: AdminOption = DEFAULT_ADMIN, token_file: TokenOption = None, config: ConfigOption = None) -> None:
    """Have a running daemon read its configuration file again: all of it is taken or nothing."""
    typer.echo(_order(admin, _token(token_file, config), "reload", {}))


def _token(named: Path | None, config: Path | None) -> str:
    from autotune.admin_token import TokenError, read_token, token_beside  # noqa: PLC0415
    from autotune.config import ConfigError, load_config  # noqa: PLC0415

    if named is None and config is not None:
        try:
            named = load_config(config).admin.token_file
        except ConfigError as error:
            raise CliError(str(error)) from error
    try:
        return read_token(named or token_beside(journal_path(None, config)))
    except TokenError as error:
        raise CliError(f"{error}; name the daemon's with --token-file or --config") from error


def _order(admin: str, token: str, name: str, body: dict[str, str]) -> str:
    if not admin.startswith(("http://", "https://")):
        raise CliError(f"--admin {admin}: must be an http address such as {DEFAULT_ADMIN}", 2)
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    address = f"{admin.rstrip('/')}/control/{name}"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers, method="POST")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # checked above
            return one_line(json.load(answer)["answer"], 1000)
    except urllib.error.HTTPError as error:
        raise CliError(_refusal(error)) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise CliError(
            f"no daemon answers at {admin} ({reason}); start one, or name its address with --admin"
        ) from error


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return one_line(json.load(error)["error"], 1000)
    except (OSError, ValueError, KeyError, TypeError):
        return f"the daemon refused (status {error.code})"
