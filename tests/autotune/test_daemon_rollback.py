"""The daemon takes back what made things worse, over a fake engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from envs.port import Change
from policies.base import Decision

INT4 = Change("kv_format", "int4")
WORSE = {"int4": 0.5}


UNBUDGETED = "policy: {quality_budget: null}\n"  # int4 at once, whatever it loses


class Wanting:
    """Always wants one change."""

    name = "wanting"

    def __init__(self, change: Change) -> None:
        self.change = change

    def initial_state(self) -> dict[str, Any]:
        return {}

    def decide(self, observation: Any, state: Any) -> tuple[Decision, Any]:
        is_there = observation.tunables[self.change.knob] == self.change.value
        return Decision(None if is_there else self.change, "steady" if is_there else "want", "wanted"), state


def wanting(rig: Any) -> Any:
    rig.parts.minds = replace(rig.parts.minds, policy=Wanting(INT4))
    return rig


def served(rig: Any, gaps: dict[Any, float]) -> None:
    """Requests whose gaps depend on the format in force."""
    rig.engine.serve_requests(5, gap_s=gaps.get(rig.engine.state.desired["kv_format"], 0.02))


def test_a_change_that_made_things_worse_is_rolled_back_and_not_tried_again(make_rig: Any) -> None:
    rig = wanting(make_rig(UNBUDGETED))
    rig.run_s(12, lambda: served(rig, WORSE))
    assert rig.engine.state.desired["kv_format"] == "int4"
    rig.run_s(10, lambda: served(rig, WORSE))
    assert rig.engine.state.desired["kv_format"] == "native"
    assert rig.engine.state.writers["kv_format"].reason.startswith("rollback: kv_format=int4 of tick 11 missed")
    assert set(rig.daemon.status()["barred"]) == {"kv_format", "kv_format=int4"}
    rig.run_s(600, lambda: served(rig, WORSE))
    (text,) = rig.daemon.status()["barred"].values()
    assert text == "kv_format=int4 was rolled back at tick 11; not tried again under the same load"
    assert rig.engine.state.revision == 2, "tried again under the same load"
    verdicts = [verdict for _, _, verdict in rig.decisions()]
    assert verdicts == ["warming_up", "applied", "applied", "cool_down", "failed_before"]
    effect = next(tick for tick in rig.ticks() if tick.id == 11).effect
    assert effect["outcome"] == "missed"
    assert effect["after"]["tbt_tail_s"] > 0.4
    assert rig.metric("autotune_judged_changes_total", outcome="missed") == 1


def test_a_rollback_outlives_the_daemon(make_rig: Any) -> None:
    first = wanting(make_rig(UNBUDGETED))
    first.run_s(15, lambda: served(first, WORSE))
    assert first.engine.state.desired["kv_format"] == "int4"
    first.close()
    again = wanting(make_rig(UNBUDGETED, engine=first.engine, clock=first.clock))
    assert again.loop.restore()
    again.run_s(30, lambda: served(again, WORSE))
    assert again.engine.state.desired["kv_format"] == "native"


def test_coarse_changes_begin_with_a_step_where_that_is_wanted(make_rig: Any) -> None:
    rig = wanting(make_rig(f"{UNBUDGETED}guard: {{effects: {{canary: [kv_format]}}}}"))
    rig.run_s(60, lambda: served(rig, {}))
    written = [value for _, value, verdict in rig.decisions() if verdict == "applied"]
    assert written == ["int8", "k8v4", "int4"]
    stamps = [tick.id for tick in rig.ticks() if tick.body.get("written")]
    assert min(later - earlier for earlier, later in pairwise(stamps)) >= 10
    assert "a first step, kv_format=int8, on the way to kv_format=int4" in rig.parts.decisions.recent(10)[1].reason


def test_a_step_that_missed_ends_the_way(make_rig: Any) -> None:
    rig = wanting(make_rig(f"{UNBUDGETED}guard: {{effects: {{canary: [kv_format]}}}}"))
    rig.run_s(300, lambda: served(rig, {"int8": 0.5}))
    written = [value for _, value, verdict in rig.decisions() if verdict == "applied"]
    assert written == ["int8", "native"]


@pytest.mark.parametrize("kept", [{}, None, {"open": 3}])
def test_what_an_earlier_version_kept_is_replaced(make_rig: Any, kept: Any) -> None:
    first = make_rig()
    first.run_s(3)
    memory = first.parts.journal.recall("loop")
    del memory["watch"], memory["replaced"]
    first.parts.journal.remember("loop", memory if kept is None else {**memory, "watch": kept})
    first.close()
    again = make_rig(engine=first.engine, clock=first.clock)
    again.engine.alive = False
    assert again.loop.restore()
    again.run_s(3)
    assert again.daemon.status()["barred"] == {}
    again.engine.alive = True
    again.run_s(3)
    assert again.metric("autotune_tick_errors_total") == 0
