"""What a daemon that is stopped does with the engine's settings, where its configuration says ``on_exit: restore``."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.journal_file import Tick
from autotune.parts import Parts
from autotune.reporter import Reporter
from autotune.writers import OWN_WRITER
from engine.tunables import TunableValue
from envs.port import Change


def restore_engine(
    parts: Parts, reporter: Reporter, replaced: Mapping[str, TunableValue], *, run: str, mode: str
) -> None:
    """Set every knob that the daemon wrote last to what ``replaced`` says; tell each, and journal them as one tick."""
    actuator, tick = parts.actuator, parts.journal.next_id
    actuator.refresh()
    actuator.reason = "the daemon stops: as before its changes"
    records = []
    for knob, value in replaced.items():
        view, writer = actuator.view, actuator.writers().get(knob)
        if view is None or writer is None or writer.writer != OWN_WRITER or view["desired"].get(knob) == value:
            continue
        old, result = view["desired"].get(knob), actuator.apply(Change(knob, value))
        records.append(reporter.at_exit(tick, knob, old, value, result))
    if records:
        parts.journal.next_id += 1
        body = {"scenario": "exit", "mode": mode, "at_exit": [row.to_json() for row in records]}
        row = Tick(tick, run, parts.clock.wall_s(), parts.clock.now_ns(), acted=True, body=body)
        parts.journal.append(row, "exit", {})
