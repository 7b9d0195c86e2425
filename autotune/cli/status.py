"""``autotune status``: how engine and daemon are, in a few lines."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli._shared import (
    UNREADABLE,
    AdminOption,
    ConfigOption,
    ControlOption,
    admin_address,
    configured,
    connect,
)
from engine.json_text import load_json
from engine.sizes import format_size
from engine.text import one_line, trouble


def register(app: typer.Typer) -> None:
    app.command("status", short_help="Show how engine and daemon are.")(status)


def status(
    control: ControlOption = None,
    admin: AdminOption = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> int:
    """Show how engine and daemon are. Exit code 1 when one of them does not answer or is not well."""
    address = admin_address(admin, config)
    watched = _watched(config) if control is None else ""
    engine, engine_problem = ({}, "") if watched else _engine(control, config)
    daemon, daemon_problem = _daemon(address)
    engine_lines, engine_problem = (
        (["engine: " + watched], "") if watched else _said(_engine_lines, engine, engine_problem)
    )
    daemon_lines, daemon_problem = _said(_daemon_lines, daemon, daemon_problem)
    if as_json:
        problems = {"engine": engine_problem, "daemon": daemon_problem}
        typer.echo(json.dumps({"engine": engine, "daemon": daemon, "problems": problems}, indent=2))
    else:
        for line in engine_lines or [f"engine: {engine_problem}"]:
            typer.echo(line)
        for line in daemon_lines or [f"daemon: {daemon_problem}"]:
            typer.echo(line)
    return int(bool(engine_problem or daemon_problem or not daemon.get("healthy")))


def _said(
    lines: Callable[[dict[str, Any]], Iterator[str]], told: dict[str, Any], problem: str
) -> tuple[list[str], str]:
    """The lines that an answer becomes, or what is wrong with it."""
    if problem:
        return [], problem
    try:
        return list(lines(told)), ""
    except UNREADABLE as error:
        return [], one_line(f"its answer cannot be read ({error!r:.80}); is it of this version?")


def _engine_lines(engine: dict[str, Any]) -> Iterator[str]:
    yield "engine: " + _engine_line(engine)
    if engine["gauges"]["host_pool_bytes"]:
        yield "host:   " + _host_line(engine)


def _daemon_lines(daemon: dict[str, Any]) -> Iterator[str]:
    """What a daemon says of itself, the line that says how it is first."""
    yield "daemon: " + _daemon_line(daemon)
    if daemon.get("quality"):
        yield "quality: " + _quality_line(daemon["quality"])
    if daemon.get("policy_refused"):
        text = f"{daemon['policy']} decides in place of what was asked for: {daemon['policy_refused']}"
        yield "  " + one_line(text)
    for line in _restart_lines(daemon.get("restart")):
        yield one_line(line)
    for line in _choice_lines(daemon.get("policy_choice")):
        yield "  " + one_line(line)
    for knob, who in daemon.get("overrides", {}).items():
        text = f"{knob} is left alone, set by {who.removesuffix(': ')}; give it back with: autotune release {knob}"
        yield "  " + one_line(text)
    for text in daemon.get("barred", {}).values():
        yield "  " + one_line(text)


def _watched(config: Path | None) -> str:
    """Of an engine of another make: that the daemon alone watches it."""
    known = configured(config)
    if known is None or known.engine.kind == "autotune":
        return ""
    return one_line(f"{known.engine.kind} at {known.engine.url}, watched by the daemon")


def _restart_lines(restart: Any) -> list[str]:
    """Beside an engine that takes its settings at its start: what is advised, and whether it may be done."""
    if not isinstance(restart, dict):
        return []
    head = f"restart: {'permitted' if restart['allowed'] else 'not permitted'}"
    if restart["under_way"]:
        return [f"{head}; under way: {restart['under_way']}"]
    advice = restart["advice"]
    if advice is None:
        return [head]
    what = ", ".join(f"{knob}={value}" for knob, value in advice["changes"]) or "none needed"
    return [f"{head}; advised: {what} ({advice['scenario']}): {advice['reason']}"]


def _choice_lines(choice: Any) -> list[str]:
    """What auto took, and why nothing else that is bundled."""
    if not isinstance(choice, dict):
        return []
    refused = [f"not {one['name']} ({one['reason']}): {one['why']}" for one in choice["refused"]]
    return [f"auto took {choice['taken']}: {choice['why']}", *refused]


def _engine(control: Path | None, config: Path | None) -> tuple[dict[str, Any], str]:
    from engine.control_client import EngineUnreachable  # noqa: PLC0415

    try:
        with connect(control, config) as client:
            return client.stats().to_json(), ""
    except EngineUnreachable as error:
        return {}, one_line(error)


def _daemon(admin: str) -> tuple[dict[str, Any], str]:
    try:
        with urllib.request.urlopen(f"{admin}/status", timeout=5) as answer:  # noqa: S310  # http only
            document = load_json(answer.read())
    except (OSError, ValueError, HTTPException) as error:
        why = f"no daemon answers at {admin} ({trouble(error)}); start one, or name its address with --admin"
        return {}, one_line(why)
    return (document, "") if isinstance(document, dict) else ({}, f"{admin}: not a daemon")


def _quality_line(quality: dict[str, Any]) -> str:
    """What of the quality budget is kept, and how it stands."""
    parts = [str(quality["holds"])]
    if quality["budget"] is not None and quality["lost_per_token"] is not None:
        parts.append(f"{quality['lost_per_token']:.3%} lost per token of late")
    exempt = quality.get("exempt")  # absent in the answer of an older daemon
    if exempt and quality["budget"] is not None:
        parts.append(f"exempt from it, as somebody else holds them: {', '.join(exempt)}")
    if quality["handed_back"]:
        parts.append(f"handed back: {', '.join(quality['handed_back'])}")
    return one_line("; ".join(parts))


def _engine_line(stats: dict[str, Any]) -> str:
    gauges, counters = stats["gauges"], stats["counters"]
    values = " ".join(f"{knob}={value}" for knob, value in stats["effective"].items())
    return one_line(
        f"{stats['model']}; {gauges['running']} running, {gauges['waiting']} waiting, "
        f"KV {gauges['kv_usage']:.0%} in use; {counters['requests_completed']} completed, "
        f"{counters['requests_failed']} failed; {values}"
    )


def _host_line(stats: dict[str, Any]) -> str:
    """The host tier: how full it is, what it was good for, and the link to it."""
    gauges, counters = stats["gauges"], stats["counters"]
    pool, used, cached = (gauges[f"host_{what}_bytes"] for what in ("pool", "used", "cached"))
    parts = [f"{format_size(used)} held by requests and {format_size(cached)} cached of {format_size(pool)}"]
    parts.append(f"{_count(gauges['parked'], 'request')} parked, {gauges['loading']} loading")
    parts.append(f"{_count(counters['host_hit_tokens'], 'prompt token')} found there")
    parts.append(f"{_count(counters['swapped_in'], 'preempted request')} resumed from it")
    moved = {"copied out": "host_out_bytes", "back": "host_in_bytes", "streamed": "host_streamed_bytes"}
    parts.append(", ".join(f"{format_size(counters[name])} {how}" for how, name in moved.items()))
    if gauges["host_link_bytes_per_s"] is not None:
        kind = "emulated link" if gauges["host_link_is_emulated"] else "link"
        parts.append(f"{kind} of {format_size(gauges['host_link_bytes_per_s'])}/s")
    return one_line("; ".join(parts))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _daemon_line(state: dict[str, Any]) -> str:
    parts = [f"mode {state.get('mode')}", f"engine {state.get('engine')}", f"policy {state.get('policy')}"]
    if state.get("problem"):
        parts.append(str(state["problem"]))
    age_s = state.get("seconds_since_change")
    parts.append("no change yet" if age_s is None else f"last change {age_s:.0f} s ago")
    return one_line("; ".join(parts))
