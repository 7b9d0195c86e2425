"""``autotune set`` and ``autotune release``: an operator's own changes, which the daemon respects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli._shared import CliError, ControlOption, connect, operator
from autotune.writers import RELEASE_PREFIX
from engine.text import one_line
from engine.tunables import TUNABLES, TunableValue, parse_change

if TYPE_CHECKING:
    from engine.control_client import ControlClient, PatchAnswer


def register(app: typer.Typer) -> None:
    app.command("set", short_help="Change knobs of a running engine.")(set_tunable)
    app.command("release", short_help="Give knobs back to the daemon.")(release)


def set_tunable(
    changes: Annotated[list[str], typer.Argument(metavar="KNOB=VALUE", help="What to change, all or nothing.")],
    control: ControlOption = None,
    reason: Annotated[str, typer.Option(help="Kept with the change and shown to whoever asks.")] = "",
    if_revision: Annotated[
        int | None, typer.Option(help="Only if nothing was written since this revision.", min=0)
    ] = None,
) -> None:
    """Change knobs of a running engine. The daemon then leaves them alone until `autotune release`.

    `autotune tunables` shows the knobs and the values that they may take.
    """
    wanted = _parse(changes)
    with connect(control) as client:
        answer = _patch(client, wanted, operator(), reason, if_revision)
    _report(wanted, answer)


def release(
    knobs: Annotated[list[str], typer.Argument(metavar="KNOB", help="Knobs that the daemon may move again.")],
    control: ControlOption = None,
) -> None:
    """Give knobs back to the daemon. Their values stay until it moves them."""
    unknown = [knob for knob in knobs if knob not in TUNABLES]
    if unknown:
        raise CliError(f"unknown tunable {unknown[0]!r}; known: {', '.join(TUNABLES)}", 2)
    with connect(control) as client:
        view = client.tunables()
        same = {knob: view["desired"][knob] for knob in knobs}
        writer = f"{RELEASE_PREFIX}{operator()}"
        answer = _patch(client, same, writer, "given back to the daemon", view["revision"])
    _report(same, answer, "{knob}: given back to the daemon, {value} until it moves it")


def _patch(
    client: ControlClient, changes: Mapping[str, TunableValue], writer: str, reason: str, if_revision: int | None
) -> PatchAnswer:
    try:
        return client.patch(changes, writer=writer, reason=reason, if_revision=if_revision)
    except UnicodeEncodeError as error:
        raise CliError("--reason must be text in UTF-8") from error
    except ValueError as error:  # the engine finds the request malformed: a reason that is too long, say
        raise CliError(str(error)) from error


def _parse(changes: list[str]) -> dict[str, TunableValue]:
    wanted: dict[str, TunableValue] = {}
    problems = []
    for text in changes:
        knob, equals, value = text.partition("=")
        if not equals:
            problems.append(f"{text!r}: write it as KNOB=VALUE")
        elif knob in wanted:
            problems.append(f"{knob}: given twice")
        else:
            try:
                wanted[knob] = parse_change(knob, value)
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise CliError("\n".join(problems), 2)
    return wanted


def _report(wanted: dict[str, TunableValue], answer: PatchAnswer, done: str | None = None) -> None:
    """Print one line per knob, ``done`` in place of the status of what was taken. Raises CliError for the rest."""
    refused = []
    for knob, result in answer["results"].items():
        line = one_line(f"{knob}={wanted.get(knob)}: {', '.join(filter(None, (result['status'], result['why'])))}")
        if result["status"] in {"applied", "converging"}:
            typer.echo(line if done is None else one_line(done.format(knob=knob, value=wanted.get(knob))))
        else:
            refused.append(line)
    if refused:
        raise CliError("\n".join(refused))
    typer.echo(f"revision {answer['revision']}")
