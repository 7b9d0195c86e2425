"""A person's own changes over the admin port: a knob set, for a while or until it is given back, or given back.

The engine keeps who wrote a knob, so the daemon sees such a change as any other writer's and leaves the knob alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from autotune.admin_actions import Action
from autotune.parts import Parts
from autotune.writers import LONGEST_PIN_S, OPERATOR_PREFIX, RELEASE_PREFIX, not_the_daemons, pinned_by
from engine.control_client import EngineUnreachable, PatchAnswer
from engine.text import one_line, rough_time
from engine.tunables import TUNABLES, TunableValue, parse_change

_WHO: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,23}")
_NOBODY_NAMED: Final = "admin"
_MOST_REASON_CHARS: Final = 200
_TAKEN: Final = frozenset({"applied", "converging"})


def override_actions(parts: Parts) -> dict[str, Action]:
    """Actions ``set`` and ``release``, for the control loop to carry out; every mode lets them through. They raise
    ValueError beside an engine that takes its settings at its start.
    """
    if parts.restarts is not None:
        return dict.fromkeys(("set", "release"), _not_while_it_runs)
    return {"set": lambda wanted: _set(parts, wanted), "release": lambda wanted: _release(parts, wanted)}


def _not_while_it_runs(_: Mapping[str, object]) -> dict[str, Any]:
    raise ValueError("this engine takes its settings at its start: they change by a restart alone")


def _set(parts: Parts, wanted: Mapping[str, object]) -> dict[str, Any]:
    """``{"knob", "value", "for_s"?, "reason"?, "who"?}``. Raises ValueError for a wish that makes no sense or that the
    engine refuses, EngineUnreachable.
    """
    _check_keys(wanted, {"knob", "value"}, {"for_s", "reason", "who"})
    knob = str(wanted["knob"])
    value, for_s = parse_change(knob, wanted["value"]), _seconds(wanted.get("for_s"))
    writer = OPERATOR_PREFIX + _who(wanted)
    if for_s is not None:
        writer = pinned_by(writer, parts.clock.now_ns() + round(for_s * 1e9))
    answer = parts.actuator.write_for(writer, {knob: value}, _reason(wanted))
    status = _status_of(answer, {knob: value})
    until = "until it is given back" if for_s is None else f"for {rough_time(for_s)}"
    return {"answer": f"{knob}={value}: {status}; left alone {until}", "revision": answer["revision"]}


def _release(parts: Parts, wanted: Mapping[str, object]) -> dict[str, Any]:
    """``{"knob"?, "who"?}``; without a knob all of them. Their values stay until the daemon moves them. Raises as
    :func:`_set`.
    """
    _check_keys(wanted, set(), {"knob", "who"})
    knob = wanted.get("knob")
    if knob is not None and (not isinstance(knob, str) or knob not in TUNABLES):
        raise ValueError(f"unknown tunable {knob!r:.60}; known: {', '.join(TUNABLES)}")
    view = parts.actuator.refresh()
    if view is None:
        raise EngineUnreachable(parts.actuator.last_error)
    theirs = not_the_daemons({name: one["writer"] for name, one in view["writers"].items()}, parts.clock.now_ns())
    same = {name: view["desired"][name] for name in theirs if knob in {None, name}}
    if not same:
        what = "the daemon may move every knob" if knob is None else f"{knob} is the daemon's already"
        return {"answer": f"nothing to give back: {what}", "revision": view["revision"]}
    writer = RELEASE_PREFIX + OPERATOR_PREFIX + _who(wanted)
    answer = parts.actuator.write_for(writer, same, "given back to the daemon", view["revision"])
    _status_of(answer, same)
    return {"answer": f"given back to the daemon: {', '.join(same)}", "revision": answer["revision"]}


def _status_of(answer: PatchAnswer, changes: Mapping[str, TunableValue]) -> str:
    results = [answer["results"].get(knob, {"status": "rejected", "why": "no answer"}) for knob in changes]
    for (knob, value), result in zip(changes.items(), results, strict=True):
        if result["status"] not in _TAKEN:
            raise ValueError(one_line(f"{knob}={value}: {result['status']}, {result['why']}"))
    return ", ".join(dict.fromkeys(result["status"] for result in results))


def _check_keys(wanted: Mapping[str, object], needed: set[str], other: set[str]) -> None:
    if missing := needed - wanted.keys():
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    if unknown := wanted.keys() - needed - other:
        raise ValueError(f"unknown: {', '.join(sorted(map(repr, unknown))):.100}")


def _seconds(given: object) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= LONGEST_PIN_S:
        raise ValueError(f"for_s must be seconds, above 0 and at most {LONGEST_PIN_S:.0f}")
    return float(given)


def _reason(wanted: Mapping[str, object]) -> str:
    reason = wanted.get("reason", "")
    if not isinstance(reason, str) or len(reason) > _MOST_REASON_CHARS:
        raise ValueError(f"the reason must be text of at most {_MOST_REASON_CHARS} characters")
    return one_line(reason)


def _who(wanted: Mapping[str, object]) -> str:
    who = wanted.get("who", _NOBODY_NAMED)
    if not isinstance(who, str) or not _WHO.fullmatch(who):
        raise ValueError("who must be a name of at most 24 letters, digits, dots, dashes, underscores or @")
    return who
