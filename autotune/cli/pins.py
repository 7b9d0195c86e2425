"""``autotune pins`` and ``autotune unpin``: prefixes that requests asked to keep."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from autotune.cli._shared import CliError, ConfigOption, ControlOption, connect
from engine.text import one_line


def register(app: typer.Typer) -> None:
    app.command("pins", short_help="Show pinned prefixes.")(pins)
    app.command("unpin", short_help="End pins before their time.")(unpin)


def pins(
    control: ControlOption = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The control API's answer, as JSON.")] = False,
) -> None:
    """Show the prefixes that requests asked to keep with prefix_ttl_s, soonest to end first."""
    with connect(control, config) as client:
        view = client.pins()
    if as_json:
        typer.echo(json.dumps(view, indent=2))
        return
    for row in view["pins"]:
        text = f"{row['id']}: {row['num_tokens']} tokens, {row['bytes'] / 2**20:.2f} MiB, ends in"
        text += f" {row['expires_in_s']:.0f} s unless used again, for request {row['request_id']}"
        typer.echo(one_line(text))
    used, most = view["bytes"] / 2**20, view["max_bytes"] / 2**20
    number = len(view["pins"])
    holders = "1 pin holds" if number == 1 else f"{number} pins hold"
    typer.echo(f"{holders} {used:.2f} MiB, at most {most:.2f} MiB")


def unpin(
    pin_ids: Annotated[
        list[int] | None, typer.Argument(metavar="ID", help="Pins to end; autotune pins shows them.", min=1)
    ] = None,
    control: ControlOption = None,
    config: ConfigOption = None,
    everything: Annotated[bool, typer.Option("--all", help="End all pins.")] = False,
) -> None:
    """End pins before their time. What they kept stays cached until room is needed."""
    if everything and pin_ids:
        raise CliError("--all ends every pin: give it without ids, or leave it out to end only those named", 2)
    if not everything and not pin_ids:
        raise CliError("name pins by their ids (autotune pins shows them), or give --all", 2)
    with connect(control, config) as client:
        try:
            ended = client.unpin() if everything else sum(client.unpin(pin_id) for pin_id in pin_ids or ())
        except ValueError as error:
            raise CliError(str(error)) from error
    typer.echo(f"{ended} ended")
