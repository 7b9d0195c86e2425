"""What the verbs have in common: errors of one line, the control socket option, who is writing.

Heavy modules are imported inside functions throughout this package, so that ``--help`` is quick and no verb pays for
another.
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.address import reachable
from autotune.writers import OPERATOR_PREFIX
from engine.paths import default_control_socket
from engine.text import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.config import Config
    from engine.control_client import ControlClient
    from policies.base import Policy

DEFAULT_ADMIN = "http://127.0.0.1:9466"
STDOUT = "-"  # in place of a path
_UNWRAPPED = 10_000  # columns; no table here comes near
_MOST_DIGITS = 18  # of a tick: SQLite's numbers end at 19


def given_path(text: str | Path) -> Path:
    """A path of the command line, for ``parser=``. Raises BadParameter for an empty one: it would be the current
    folder. ``./-`` is a file of that name and no standard output, which is what ``-`` alone may mean.
    """
    if not str(text):
        raise typer.BadParameter("the path is empty; name one, or leave the option out")
    path = Path(text)
    return path.absolute() if str(path) == STDOUT != str(text) else path


def new_path(text: str | Path) -> Path:
    """The same, for what is made by that name and cannot go to standard output: raises BadParameter for ``-``, too."""
    if str(text) == STDOUT:
        raise typer.BadParameter("this cannot go to standard output; name a path, ./- if that is its name")
    return given_path(text)


def tell_choice(policy: Policy | None) -> None:
    """Of ``auto``: what it took and why nothing else, on stderr; nothing for any other policy."""
    from policies.choice import choice_of  # noqa: PLC0415

    choice = choice_of(policy)
    for line in choice.lines() if choice is not None else ():
        typer.echo(one_line(line), err=True)


ControlOption = Annotated[
    Path | None,
    typer.Option(
        "--control",
        metavar="SOCKET",
        help=f"Control socket of the engine; {default_control_socket()} if not said elsewhere.",
        show_default=False,
        parser=given_path,
    ),
]
JournalOption = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        metavar="FILE",
        help="Journal; the configuration's or the default one if absent.",
        show_default=False,
        parser=given_path,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The daemon's configuration: names engine, daemon and journal.",
        show_default=False,
        parser=given_path,
    ),
]
AdminOption = Annotated[
    str | None,
    typer.Option(
        "--admin",
        metavar="URL",
        help=f"Admin address of the daemon; the configuration's, or {DEFAULT_ADMIN}, if absent.",
        show_default=False,
    ),
]
_MAX_ERROR_CHARS = 2000


class CliError(Exception):
    """Something the user can act on: printed as one line per problem, then the process exits with ``code``."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def check_writable(out: Path) -> None:
    """What takes minutes should not end in a path that cannot be written. Raises CliError."""
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise CliError(f"{out}: cannot be written; name a file in a folder that exists and is writable", 2)


def fail_with(command: Callable[[], Any]) -> int:
    """Run a command line and turn what it raises into a line on stderr and an exit code."""
    try:
        result = command()
        sys.stdout.flush()
    except CliError as error:
        _print_error(str(error))
        return error.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        from engine.control_client import EngineUnreachable  # noqa: PLC0415

        if isinstance(error, EngineUnreachable):
            _print_error(str(error))
            return 1
        # Usage errors come from click or from the copy of it inside typer, whichever this version of typer uses.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            context = getattr(error, "ctx", None)
            hint = f" (see {context.command_path} --help)" if context is not None else ""
            _print_error(error.format_message() + hint)
            return int(error.exit_code)
        if type(error).__name__ == "Abort":
            return 130
        raise
    return result if isinstance(result, int) else 0


def configured(config: Path | None) -> Config | None:
    """The configuration that is named, None if none is. Raises CliError for one that cannot be used."""
    if config is None:
        return None
    from autotune.config import ConfigError, load_config  # noqa: PLC0415

    try:
        return load_config(config)
    except ConfigError as error:
        raise CliError(str(error)) from error


def connect(control: Path | None, config: Path | None = None, timeout_s: float = 5.0) -> ControlClient:
    """A client of the engine that is named, the configuration's, or the default one; use it in ``with``.

    Raises CliError for a configuration that names an engine of another make: those have no control socket.
    """
    from engine.control_client import ControlClient  # noqa: PLC0415

    known = configured(config) if control is None else None
    if known is not None and known.engine.kind != "autotune":
        raise CliError(
            f"{config}: {known.engine.kind} at {known.engine.url} has no control socket; "
            f"autotune status --config {config} shows how it is, --control names an engine of ours"
        )
    named = control if known is None else known.engine.control
    return ControlClient(named or default_control_socket(), timeout_s=timeout_s)


def admin_address(admin: str | None, config: Path | None) -> str:
    """Where the daemon answers: the address that is named, the configuration's, or the default one, without a slash.

    Raises CliError for what is no address, and for a configuration that has no admin port or a random one.
    """
    if admin is not None:
        if not admin.startswith(("http://", "https://")):
            raise CliError(f"--admin {admin}: must be an http address such as {DEFAULT_ADMIN}", 2)
        return admin.rstrip("/")
    known = configured(config)
    if known is None:
        return DEFAULT_ADMIN
    section = known.admin
    if not section.enabled or not section.port:
        why = "takes a free port" if section.enabled else "has no admin port"
        raise CliError(f"{config}: the daemon {why} by it; name its address with --admin")
    return reachable(section.host, section.port)


def console_for_stdout() -> Console:
    """As wide as the terminal; where output goes to a file or a program, lines are left whole."""
    from rich.console import Console  # noqa: PLC0415

    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNWRAPPED)


def tick_id(text: str | int) -> int:
    """A tick as `autotune decisions` shows it, ``120`` or ``[120]``, for ``parser=``. Raises BadParameter."""
    digits = str(text).strip().removeprefix("[").removesuffix("]")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > _MOST_DIGITS or not int(digits):
        raise typer.BadParameter(f"{one_line(text, 40)!r}: give a tick such as 120; `autotune decisions` shows them")
    return int(digits)


def journal_path(journal: Path | None, config: Path | None) -> Path:
    """The journal that is meant: the one named, the configuration's, or the default one."""
    from autotune.journal_file import default_journal  # noqa: PLC0415

    if journal is not None:
        return journal
    known = configured(config)
    return (known and known.journal.path) or default_journal(os.environ, os.geteuid())


@contextmanager
def reading_journal() -> Iterator[None]:
    """What is wrong with a journal becomes one line that says how to name another."""
    from autotune.journal_file import JournalError  # noqa: PLC0415

    try:
        yield
    except JournalError as error:
        raise CliError(f"{error}; name the daemon's with --journal or --config") from error


UNREADABLE = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What comes of looking at a row that has not the shape that this version writes."""


@contextmanager
def reading_row(tick: int) -> Iterator[None]:
    """A row that another version has written, or nobody, becomes one line."""
    try:
        yield
    except UNREADABLE as error:
        raise CliError(f"tick {tick} cannot be read: {error!r:.80}; another version may have written it") from error


def tick_range(text: str) -> tuple[int, int | None]:
    """``""``, ``"120"`` or ``"120-180"`` as the first tick and the last one, None for no end."""
    first, dash, last = text.partition("-")
    if not text:
        return 1, None
    if not first.isdecimal() or (dash and not last.isdecimal()) or len(text) > 40:
        raise CliError(f"{text!r}: give a tick such as 120, or a range such as 120-180", 2)
    return int(first), int(last) if dash else int(first)


def operator() -> str:
    """The writer name of the person at the command line."""
    try:
        return f"{OPERATOR_PREFIX}{getpass.getuser()}"
    except (KeyError, OSError):  # a user id without a name
        return f"{OPERATOR_PREFIX}{os.getuid()}"


def _print_error(message: str) -> None:
    for line in message.splitlines() or [""]:
        if line.strip():
            print(f"error: {one_line(line, _MAX_ERROR_CHARS)}", file=sys.stderr)  # noqa: T201
