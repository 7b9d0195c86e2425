"""``autotune set`` and ``autotune release``: an operator's own changes, which the daemon respects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final

import typer

from autotune.cli._shared import CliError, ConfigOption, ControlOption, connect, operator
from autotune.writers import LONGEST_PIN_S, RELEASE_PREFIX, not_the_daemons, pinned_by
from engine.text import one_line
from engine.tunables import TUNABLES, TunableValue, parse_change

if TYPE_CHECKING:
    from engine.control_client import ControlClient, PatchAnswer, TunablesView

_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")
_UNIT_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def register(app: typer.Typer) -> None:
    app.command("set", short_help="Change knobs of a running engine.")(set_tunable)
    app.command("release", short_help="Give knobs back to the daemon.")(release)
    app.command("pin", short_help="Change knobs for a while, then give them back.")(pin)


def set_tunable(
    changes: Annotated[list[str], typer.Argument(metavar="KNOB=VALUE", help="What to change, all or nothing.")],
    control: ControlOption = None,
    config: ConfigOption = None,
    reason: Annotated[str, typer.Option(help="Kept with the change and shown to whoever asks.")] = "",
    if_revision: Annotated[
        int | None, typer.Option(help="Only if nothing was written since this revision.", min=0)
    ] = None,
) -> None:
    """Change knobs of a running engine. The daemon then leaves them alone until `autotune release`.

    `autotune tunables` shows the knobs and the values that they may take.
    """
    wanted = _parse(changes)
    with connect(control, config) as client:
        answer = _patch(client, wanted, operator(), reason, if_revision)
    _report(wanted, answer)


def release(
    knobs: Annotated[
        list[str] | None, typer.Argument(metavar="[KNOB]", help="Knobs that the daemon may move again; all if absent.")
    ] = None,
    control: ControlOption = None,
    config: ConfigOption = None,
) -> None:
    """Give knobs back to the daemon. Their values stay until it moves them."""
    unknown = [knob for knob in knobs or () if knob not in TUNABLES]
    if unknown:
        raise CliError(f"unknown tunable {unknown[0]!r}; known: {', '.join(TUNABLES)}", 2)
    with connect(control, config) as client:
        view = client.tunables()
        theirs = _theirs(view)
        for knob in dict.fromkeys(knobs or ()):
            if knob not in theirs:
                typer.echo(f"{knob}: is the daemon's already, nothing to give back")
        same = {knob: view["desired"][knob] for knob in theirs if not knobs or knob in knobs}
        if not same:
            if not knobs:
                typer.echo("nothing to give back: the daemon may move every knob")
            return
        writer = f"{RELEASE_PREFIX}{operator()}"
        answer = _patch(client, same, writer, "given back to the daemon", view["revision"])
    _report(same, answer, "{knob}: given back to the daemon, {value} until it moves it")


def pin(
    changes: Annotated[list[str], typer.Argument(metavar="KNOB=VALUE", help="What to change, all or nothing.")],
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="How long, like 90s, 30m, 2h or 1d.")],
    control: ControlOption = None,
    config: ConfigOption = None,
    reason: Annotated[str, typer.Option(help="Kept with the change and shown to whoever asks.")] = "",
) -> None:
    """Change knobs of a running engine for a while. The daemon leaves them alone until then, or `autotune release`.

    The engine keeps the pin with the value: it outlives the daemon, and ends with the engine.
    """
    from engine.clock import RealClock  # noqa: PLC0415

    wanted, seconds = _parse(changes), _seconds(duration)
    writer = pinned_by(operator(), RealClock().now_ns() + round(seconds * 1e9))
    with connect(control, config) as client:
        answer = _patch(client, wanted, writer, reason, None)
    _report(wanted, answer, f"{{knob}}={{value}} for {duration}, then the daemon may move it again")


def _seconds(text: str) -> float:
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _UNIT_S[found[2]] if found else 0.0
    if not 0 < seconds <= LONGEST_PIN_S:
        raise CliError(f"--for {text!r}: write a time like 90s, 30m, 2h or 1d, at most 30d", 2)
    return seconds


def _theirs(view: TunablesView) -> list[str]:
    from engine.clock import RealClock  # noqa: PLC0415

    writers = {knob: record["writer"] for knob, record in view["writers"].items()}
    return not_the_daemons(writers, RealClock().now_ns())


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
