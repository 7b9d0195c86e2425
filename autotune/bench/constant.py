"""Constant load on a real engine: does the daemon settle, and does it yield to an operator and come back?

The load is Poisson at one rate into a pool that it fills by about half, so that demand wanders around where the default
rules have their thresholds. Two thirds through, an operator sets the KV format to what the rules do not want, and gives
it back later. Everything is done by the command line and read from journal and status, as people do.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from autotune.bench.context import Context, Outcome
from autotune.bench.stand import Stand
from autotune.bench.traffic import Load, Traffic
from autotune.demo.stack import VERBS
from autotune.journal_file import Tick

_MINUTES: Final = 60.0
_SETTLE_S: Final = 300.0
_MOST_CHANGES: Final = 1
_TICK_S: Final = 1.0
_POOL_BYTES: Final = 4 << 20
_RPS: Final = 3.0
_KNOB: Final = "kv_format"
_AGAINST: Final = {"native": "int8"}  # of any other format: back to native
_CONFIG: Final[dict[str, Any]] = {"tick_s": _TICK_S}
_TOOK: Final = frozenset({"applied", "converging"})


def run(context: Context) -> Outcome:
    seconds = 60.0 * (context.minutes or (1.5 if context.quick else _MINUTES))
    settle_s = min(_SETTLE_S, seconds / 3)
    with Stand(context, "constant", _CONFIG, pool_bytes=_POOL_BYTES) as stand:
        traffic = Traffic(stand.stack.url, Load(lambda _: _RPS), context.clock, context.seed)
        traffic.start()
        begin_ns = context.clock.now_ns()
        try:
            context.log(
                f"constant: {seconds / 60:g} minutes at {_RPS:g} requests/s, changes count from {settle_s:.0f} s on"
            )
            stand.sleep(2 * seconds / 3)
            override = _override(context, stand, max(20.0, seconds / 10))
            released_ns = context.clock.now_ns()
            stand.sleep(seconds - (released_ns - begin_ns) / 1e9)
        finally:
            tally = traffic.stop()
        ticks = stand.ticks()
    late = [tick for tick in ticks if tick.stamp_ns >= begin_ns + round(settle_s * 1e9) and changed(tick)]
    own = of_the_load(late, released_ns)
    demand = [value for tick in ticks if (value := _demand(tick)) is not None]
    figures: dict[str, Any] = {
        "constant_minutes": round(seconds / 60, 1),
        "constant_settle_s": settle_s,
        "constant_changes": sum(changed(tick) is not None for tick in ticks),
        "constant_changes_late": len(own),
        "constant_changes_after_release": sum(tick.stamp_ns > released_ns for tick in late),
        "constant_kv_demand": [round(f(demand), 2) for f in (min, fmean, max)] if demand else None,
        "constant_requests": tally.sent,
        "constant_completed": tally.completed,
        "constant_failed": len(tally.failed) + tally.cancelled,
        **override,
    }
    for tick in late:
        context.log(f"constant: tick {tick.id}, {(tick.stamp_ns - begin_ns) / 1e9:.0f} s: {tick.body['reason']}")
    outcome = Outcome(figures)
    outcome.bar("constant_changes_late", _MOST_CHANGES)
    outcome.bar("constant_failed", 0)
    if not tally.completed:
        outcome.missed.append("no request was completed: nothing was under load")
    if not override["constant_override_ok"]:
        outcome.missed.append("the operator's change was not seen, named, respected and released")
    return outcome


def of_the_load(late: Sequence[Tick], released_ns: int) -> list[Tick]:
    """Changes that count. What the operator has turned the daemon turns back once it may: that one is not the load's
    doing, but any after it is.
    """
    back = next((tick for tick in late if tick.stamp_ns > released_ns and changed(tick) == _KNOB), None)
    return [tick for tick in late if tick is not back]


def changed(tick: Tick) -> str | None:
    """The knob that the daemon changed at this tick, None for none."""
    written, decision = tick.body.get("written"), tick.body.get("decision")
    return str(decision["knob"]) if written and written[0] in _TOOK and decision else None


def _override(context: Context, stand: Stand, hold_s: float) -> dict[str, Any]:
    """Set a knob, look on for so long, give it back; what was seen of it."""
    now = str(stand.control.tunables()["desired"][_KNOB])
    value = _AGAINST.get(now, "native")
    _autotune(stand, "set", f"{_KNOB}={value}", "--reason", "bench")
    record = stand.control.tunables()["writers"][_KNOB]
    last_id = stand.ticks()[-1].id
    stand.sleep(hold_s / 2)
    shown = (stand.status() or {}).get("overrides", {}).get(_KNOB, "")
    stand.sleep(hold_s / 2)
    after = stand.control.tunables()
    _autotune(stand, "release", _KNOB)
    released_ns = stand.control.tunables()["writers"][_KNOB]["stamp_ns"]
    stand.sleep(2.5 * _TICK_S)
    ticks = stand.ticks(last_id - 10)
    noticed = [tick for tick in ticks if any(row["knob"] == _KNOB for row in tick.body.get("overrides_begun", ()))]
    free = [tick for tick in ticks if tick.stamp_ns > released_ns and _KNOB not in tick.body["observation"]["held"]]
    seen_s = (noticed[0].stamp_ns - record["stamp_ns"]) / 1e9 if noticed else None
    free_s = (free[0].stamp_ns - released_ns) / 1e9 if free else None
    limit_s = 1.1 * _TICK_S  # the tick's own work is told with its end
    checks = {
        "seen within a tick": seen_s is not None and seen_s <= limit_s,
        "named": shown.startswith(record["writer"]) and record["writer"].startswith("operator:"),
        "respected": after["desired"][_KNOB] == value and after["writers"][_KNOB] == record,
        "released": free_s is not None and free_s <= limit_s and _KNOB not in (stand.status() or {})["overrides"],
    }
    context.log(f"constant: {_KNOB} {now} -> {value} by {record['writer']}: {checks}")
    return {
        "constant_override_ok": all(checks.values()),
        "constant_override": checks,
        "constant_override_seen_s": seen_s,
        "constant_override_released_s": free_s,
        "constant_override_held_s": hold_s,
        "constant_override_refusals": sum("override" in str(tick.body.get("verdict")) for tick in ticks),
    }


def _autotune(stand: Stand, *arguments: str) -> None:
    command = [*VERBS, *arguments, "--control", str(stand.stack.control)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)  # noqa: S603  # our own verbs


def _demand(tick: Tick) -> float | None:
    value = tick.body.get("observation", {}).get("values", {}).get("kv_demand")
    return value if isinstance(value, float) else None
