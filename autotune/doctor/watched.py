"""An engine of another make: does it answer and tell its settings, and could a permitted restart be made?"""

from __future__ import annotations

import os
from collections.abc import Iterator

from autotune.adapters.base import RestartableEngine
from autotune.adapters.restart_file import FileRefused, read_own
from autotune.config import Config
from autotune.doctor.finding import Finding, ok, problem, warning
from autotune.doctor.probes import Probes
from engine.control_client import EngineUnreachable


def check_watched(config: Config, engine: RestartableEngine) -> Iterator[Finding]:
    """Whether the engine that the configuration names answers, and says what advice rests on."""
    try:
        readings, who = engine.read(), str(engine.identity())
    except EngineUnreachable as error:
        advice = "start it, with its metrics page (--enable-metrics, --metrics), or mend engine.kind and engine.url"
        yield warning("engine", str(error), advice)
        return
    label = config.engine.label
    if label is None and len(readings) > 1:
        yield problem("engine", f"{who}: several on one page ({', '.join(readings)})", "name one in engine.label")
        return
    if label is not None and label not in readings:
        yield problem("engine", f"{who}: no engine {label!r}", f"engine.label: one of {', '.join(readings)}")
        return
    effective = readings[next(iter(readings)) if label is None else label].effective
    unknown = [knob for knob in (*engine.kv_knobs, engine.slot_knob) if knob and knob not in effective]
    if unknown:
        advice = "nothing can be advised without; see docs/adapters.md (llama.cpp: run as its user, and give it -np)"
        yield warning("engine", f"{who} at {config.engine.url} does not tell its {', '.join(unknown)}", advice)
        return
    told = " ".join(f"{knob}={value}" for knob, value in effective.items())
    yield ok("engine", f"{who} at {config.engine.url}: {told}")


def check_restart(probes: Probes, config: Config) -> Iterator[Finding]:
    """Whether what a permitted restart needs is there; that nothing is, where none is permitted."""
    section = config.restart
    if not section.allowed or section.file is None:
        yield ok("restart", "not permitted: advice only")
        return
    try:
        read_own(section.file)
    except FileRefused as error:
        yield problem("restart", str(error), "name another file in restart.file, or remove this one")
        return
    if not probes.access(section.file.parent, os.W_OK | os.X_OK):
        advice = "give the daemon's unit ReadWritePaths= of it, and its user the right to write there"
        yield problem("restart", f"this user may not write to {section.file.parent}", advice)
        return
    missing = [command[0] for command in section.commands if probes.which(command[0]) is None]
    if missing:
        yield problem("restart", f"{missing[0]} is not to be found", "give its whole path in restart.commands")
        return
    yield ok("restart", f"PERMITTED, at most every {section.min_interval_s:g} s, writing {section.file}")
