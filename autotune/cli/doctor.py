"""``autotune doctor``: what on this machine keeps an engine or a daemon from running well, and what to do about it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli._shared import ControlOption, given_path
from engine.text import one_line

if TYPE_CHECKING:
    from autotune.doctor.finding import Finding

_MARKS = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}
_MOST_CHARS = 600


def register(app: typer.Typer) -> None:
    app.command("doctor", short_help="Look for what is wrong on this machine.")(doctor)


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="The daemon's configuration; /etc/kv-autotune/autotune.yaml if absent and there.",
            show_default=False,
            parser=given_path,
        ),
    ] = None,
    control: ControlOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The engine's HTTP port.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Every finding, as JSON.")] = False,
) -> int:
    """Check device, driver, torch, compiler, memory, permissions, ports, packages, configuration, engine, processor and
    daemon.

    Changes nothing. Exit code 1 when there is a problem; warnings alone are 0.
    """
    from autotune.doctor.probes import real_probes  # noqa: PLC0415  # imports that --help need not wait for
    from autotune.doctor.run import Asked, examine  # noqa: PLC0415

    findings: list[Finding] = []
    for finding in examine(real_probes(sys.path), Asked(config, control, port)):
        findings.append(finding)
        if not as_json:
            _show(finding)
    problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        warnings = sum(finding.level == "warning" for finding in findings)
        typer.echo(f"{problems} problem(s), {warnings} warning(s)")
    return int(problems > 0)


def _show(finding: Finding) -> None:
    typer.echo(f"{_MARKS[finding.level]} {finding.check}: {one_line(finding.found, _MOST_CHARS)}")
    if finding.advice:
        typer.echo(f"        -> {one_line(finding.advice, _MOST_CHARS)}")
