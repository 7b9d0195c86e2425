"""The secret that admin actions need: a file that only its owner can read, made at the daemon's first start."""

from __future__ import annotations

import hmac
import secrets
import stat
from pathlib import Path

from engine.whole_file import write_new

_MAX_BYTES = 4096
_LEAST_CHARS = 16


class TokenError(Exception):
    """There is no usable token, in one line that says what to do."""


def token_beside(journal: Path) -> Path:
    """Where the token lies when the configuration names no place."""
    return journal.with_name("admin.token")


def read_token(path: Path) -> str:
    """The token in a file. Raises TokenError when it cannot be read or is too short to be one."""
    try:
        with path.open(encoding="ascii") as stream:
            token = stream.read(_MAX_BYTES).strip()
    except (OSError, ValueError) as error:
        raise TokenError(f"admin token {path}: {getattr(error, 'strerror', None) or 'not ASCII text'}") from error
    if len(token) < _LEAST_CHARS:
        raise TokenError(
            f"admin token {path}: shorter than {_LEAST_CHARS} characters; delete it, or write a longer one"
        )
    return token


def own_token(path: Path, *, make: bool) -> str:
    """The daemon's token; with ``make`` it is made if there is none.

    Raises TokenError, also for a file that others may read.
    """
    if make:
        try:
            write_new(path, secrets.token_urlsafe(32) + "\n", mode=0o600)
        except FileExistsError:
            pass
        except OSError as error:
            raise TokenError(f"admin token {path}: {error.strerror}; set admin.token_file") from error
    token = read_token(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise TokenError(f"admin token {path}: others may read it; chmod 600 it and write a new one")
    return token


def is_token(given: str, token: str) -> bool:
    """Whether they are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode(), token.encode())
