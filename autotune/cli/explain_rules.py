"""``autotune explain-rules``: what rules would do as the load rises and falls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli._places import check_places, is_stdout, write_parts
from autotune.cli._shared import CliError, given_path
from autotune.cli._simulated import NoiseOption, PoolOption, ProfileOption, RulesArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from policies.sweep import Level

_LOADS = "0.2,0.4,0.6,0.8,1,1.2,1.5,2"
_MOST = 100.0  # times what native serves
_LONGEST_S = 86_400.0
_INTERVAL_S = 1.0
_WIDE = 180


def register(app: typer.Typer) -> None:
    app.command("explain-rules", short_help="What rules would do over the load.")(explain_rules)


def explain_rules(
    rules: RulesArgument = "default",
    *,
    profile: ProfileOption = None,
    loads: Annotated[str, typer.Option(metavar="LOAD,...", help="Shares of what native storage serves.")] = _LOADS,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of every request.")] = 810,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of every request.")] = 143,
    noise: NoiseOption = 0.05,
    hold: Annotated[float, typer.Option(help="Simulated seconds at each load.")] = 120.0,
    kv_pool_bytes: PoolOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it into an HTML file; - for stdout.", parser=given_path)
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the levels here; - for stdout.", parser=given_path)
    ] = None,
) -> None:
    """Simulate RULES at rising and then falling constant loads: active rules, settings, memory and latency at each.

    The engine goes on from level to level, so where the way down differs from the way up, it is the rules' hysteresis.
    """
    from rich.console import Console  # noqa: PLC0415  # heavy imports, and not for --help

    from autotune.simulation.explained import html, table  # noqa: PLC0415
    from engine.errors import EngineError  # noqa: PLC0415
    from engine.sizes import parse_size  # noqa: PLC0415
    from envs.profile import read_profile  # noqa: PLC0415
    from envs.simulated import DEFAULT_PROFILE  # noqa: PLC0415
    from policies.rules import RuleError, load_rules  # noqa: PLC0415
    from policies.steady import Bench, SteadyLoad  # noqa: PLC0415
    from policies.sweep import sweep  # noqa: PLC0415

    try:
        check_places({"--plot": plot, "--json": json_out}, {"FILE": rules, "--profile": profile})
        rule_set, shares = load_rules(rules), _shares(loads)
        _check_hold(hold)
        pool_bytes = None if kv_pool_bytes is None else parse_size(kv_pool_bytes)
        bench = Bench.of(
            read_profile(profile or DEFAULT_PROFILE), SteadyLoad(prompt_tokens, output_tokens, noise), pool_bytes
        )
        levels = sweep(bench, rule_set, shares, hold_s=hold, interval_s=_INTERVAL_S)
    except RuleError as error:
        raise CliError("\n".join(error.problems), 2) from error
    except EngineError as error:
        raise CliError(str(error)) from error
    except ValueError as error:
        raise CliError(str(error), 2) from error
    notes = [
        f"profile: {bench.profile.describe()}",
        f"load 1, what native serves: {bench.capacity_rps:.3g}/s of {prompt_tokens} + {output_tokens} tokens",
        f"targets: {bench.targets.ttft_s:.3g} s to the first token, {bench.targets.tbt_s:.3g} s between tokens",
    ]
    console = Console(stderr=is_stdout(json_out) or is_stdout(plot), highlight=False)
    _show(console, levels, notes, table(levels))
    if plot is not None:
        write_parts(plot, [html(rules, bench, levels)])
    _write_json(json_out, levels)


def _check_hold(hold_s: float) -> None:
    if not _INTERVAL_S < hold_s <= _LONGEST_S:
        raise ValueError(f"--hold must be more than {_INTERVAL_S:g} and at most {_LONGEST_S:g}, got {hold_s:g}")


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or shares != sorted(set(shares)) or not all(0 < share <= _MOST for share in shares):
        raise ValueError(f"--loads {text!r}: write rising numbers up to {_MOST:g}, such as {_LOADS}")
    return shares


def _show(
    console: Console, levels: Sequence[Level], notes: Sequence[str], rows: tuple[list[str], list[list[str]]]
) -> None:
    from rich.table import Table  # noqa: PLC0415

    from policies.sweep import differences  # noqa: PLC0415

    if not console.is_terminal:
        console.width = _WIDE
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="left" if name in {"", "active rules", "settings"} else "right", overflow="fold")
    for row in rows[1]:
        table.add_row(*row)
    console.print(table)
    differ = differences(levels)
    for load, knobs in differ:
        what = ", ".join(f"{knob} {up} on the way up, {down} on the way down" for knob, (up, down) in knobs.items())
        console.print(f"hysteresis at load {load:g}: {what}", markup=False, soft_wrap=True)
    if not differ:
        console.print("the way down holds the same settings as the way up", markup=False)


def _write_json(place: Path | None, levels: Sequence[Level]) -> None:
    if place is None:
        return
    rows = [level.to_json() for level in levels]
    write_parts(place, [json.dumps(rows, indent=None if is_stdout(place) else 1), "\n"])
