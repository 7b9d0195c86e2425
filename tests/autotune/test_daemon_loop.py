"""The control loop as a whole, over a fake engine: what it does and what it leaves alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Never

import pytest

from engine.stats import ResidentBytes
from envs.port import Change
from envs.reward import Charge
from envs.simulated import DEFAULT_PROFILE
from envs.spaces import Observation
from policies.base import Decision
from policies.guard import GuardContext, Writer

PRESSURE = "policy: {rules: literature, quality_budget: null}\n"


def pressed(engine: Any) -> None:
    engine.set_usage(0.95, running=60, waiting=30)
    engine.serve_requests(5, ttft_s=3.0, gap_s=0.2)


def test_no_action_before_one_full_window_then_it_acts(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(10, lambda: pressed(rig.engine))
    assert rig.engine.state.revision == 0
    assert {verdict for _, _, verdict in rig.decisions()} == {"warming_up"}
    rig.run_s(5, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int4"
    record = rig.engine.state.writers["kv_format"]
    assert record.writer == "autotune"
    assert "load" in record.reason  # the reason with its figures travels to the engine


def test_a_restart_under_heavy_load_acts_on_a_whole_window_and_resets_nothing(make_rig: Any) -> None:
    """Case J.40: the first readings are missing, then show nothing yet; what is in force is read back and stays."""
    first = make_rig(PRESSURE)
    first.run_s(15, lambda: pressed(first.engine))
    engine, revision = first.engine, first.engine.state.revision
    assert engine.state.desired["kv_format"] == "int4"
    first.close()
    again = make_rig(PRESSURE, engine=engine, clock=first.clock)
    again.daemon.restore()
    engine.alive = False
    again.run_s(3)
    engine.alive = True
    engine.set_usage(0.0, running=0)
    again.run_s(2)
    assert again.daemon.status()["tunables"]["kv_format"] == "int4"
    again.run_s(7, lambda: pressed(engine))
    assert again.daemon.status()["observed_s"] < 10
    assert engine.state.revision == revision
    assert {verdict for _, _, verdict in again.decisions()} <= {"warming_up"}
    again.run_s(15, lambda: pressed(engine))
    assert engine.state.desired["kv_format"] == "int4"


def test_every_tick_is_journalled_with_what_was_seen_and_done(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(30, lambda: pressed(rig.engine))
    ticks = rig.ticks()
    assert [tick.id for tick in ticks] == list(range(1, 31))
    assert all(tick.body["observation"]["stamp_ns"] > 0 for tick in ticks)
    written = [tick for tick in ticks if tick.body.get("written")]
    assert written
    assert written[0].body["written"][0] == "applied"
    assert written[0].acted


def test_with_a_profile_the_guard_keeps_the_quality_budget_and_the_journal_replays(make_rig: Any) -> None:
    rig = make_rig(f"policy: {{rules: literature, profile: {DEFAULT_PROFILE}}}\n")
    rig.run_s(40, lambda: pressed(rig.engine))
    # As far as the budget bears of the int4 that the rules ask for at every tick: told and written once.
    assert rig.engine.state.desired["kv_format"] == "int8"
    assert [row for row in rig.decisions() if row[0] == "kv_format"] == [
        ("kv_format", "int4", "warming_up"),
        ("kv_format", "int8", "applied"),
    ]
    assert "in place of int4" in rig.engine.state.writers["kv_format"].reason

    def lossy() -> None:
        pressed(rig.engine)
        used = rig.engine.figures.gauges.kv_used_bytes
        rig.engine.figures.gauges.resident = [ResidentBytes("int4", 32, used, used // 300)]

    # As if somebody had started the engine so: no writer, and nothing saved that could pay for it.
    rig.engine.restart()
    rig.engine.state.desired["kv_format"] = rig.engine.state.effective["kv_format"] = "int4"
    rig.run_s(20, lossy)
    assert rig.engine.state.desired["kv_format"] == "int8"
    assert "quality budget:" in rig.engine.state.writers["kv_format"].reason
    own = next(r for r in rig.parts.decisions.recent(500) if r.scenario == "quality-budget")
    assert (own.old, own.new, own.verdict) == ("int4", "int8", "applied")
    quality = rig.daemon.status()["quality"]
    assert quality["handed_back"] == ["kv_format"]
    assert quality["lost_per_token"] > 0.005
    replayed = 0
    for tick in rig.ticks():
        if "verdict" not in tick.body:
            continue
        proposal, charge = tick.body["proposal"], Charge(*tick.body["charge"])
        writers = {knob: Writer(*entry) for knob, entry in tick.body["writers"].items()}
        context = GuardContext(Observation.from_json(tick.body["observation"]), writers, charge=charge)
        change = None if proposal is None else Change(*proposal)
        verdict, _ = rig.parts.minds.guard.check(change, context, tick.body["guard_state"])
        assert [verdict.code, verdict.text] == tick.body["verdict"]
        replayed += verdict.is_short or verdict.code == "handed_back"
    assert replayed > 3


def test_without_a_profile_the_budget_is_kept_by_published_figures(make_rig: Any) -> None:
    rig = make_rig("policy: {rules: literature}\n")
    rig.run_s(40, lambda: pressed(rig.engine))
    assert "estimated, published" in rig.daemon.status()["quality"]["holds"]
    assert rig.engine.state.desired["kv_format"] == "int8"
    assert rig.metric("autotune_quality_budget_ratio") == 0.005


def test_a_budget_of_null_keeps_none(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(40, lambda: pressed(rig.engine))
    status = rig.daemon.status()["quality"]
    assert "no quality budget is kept" in status["holds"]
    assert status["budget"] is None
    assert rig.engine.state.desired["kv_format"] == "int4"
    assert math.isnan(rig.metric("autotune_quality_budget_ratio"))


def test_refusals_that_take_turns_are_told_once_each(make_rig: Any, tmp_path: Path) -> None:
    """Two knobs that stay refused: a policy proposes them by turns, and so would the log."""
    (tmp_path / "both.yaml").write_text(
        "version: 1\nname: both\nrules:\n"
        "  - {name: other, when: load > 0.5, set: {prefix_eviction: lfu}}\n"
        "  - {name: shrink, when: load > 0.5, set: {kv_format: int4}}\n"
        "  - {name: wide, when: load > 0.5, set: {host_offload: 'on'}}\n"
    )
    allowed = "guard: {allowed: {host_offload: ['off'], prefix_eviction: [lru]}}\n"
    rig = make_rig(f"policy: {{rules: {tmp_path / 'both.yaml'}}}\n{allowed}")
    rig.run_s(60, lambda: pressed(rig.engine))
    told = [row for row in rig.decisions() if row[2] != "warming_up"]
    assert sorted(told) == [
        ("host_offload", "on", "not_allowed"),
        ("kv_format", "int8", "applied"),
        ("kv_format", "k8v4", "applied"),  # once it is saved for
        ("prefix_eviction", "lfu", "not_allowed"),
    ]


def test_what_a_change_did_is_measured_one_window_later(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(10.5, lambda: pressed(rig.engine))
    changed = next(tick for tick in rig.ticks() if tick.body.get("written"))
    assert changed.effect is None

    def relieved() -> None:
        rig.engine.set_usage(0.9, running=60, waiting=0)
        rig.engine.serve_requests(5, ttft_s=0.1, gap_s=0.01)

    rig.run_s(14, relieved)
    effect = next(tick for tick in rig.ticks() if tick.id == changed.id).effect
    assert effect["before"]["ttft_tail_s"] == pytest.approx(3.0, rel=0.06)
    assert effect["after"]["ttft_tail_s"] == pytest.approx(0.1, rel=0.06)
    shown = next(r for r in rig.parts.decisions.recent(50) if r.tick == changed.id)
    assert shown.effect == effect


@pytest.mark.parametrize(("mode", "verdict"), [("advise", "advised"), ("off", "off")])
def test_other_modes_do_everything_but_write(make_rig: Any, mode: str, verdict: str) -> None:
    rig = make_rig(PRESSURE + f"mode: '{mode}'\n")
    rig.run_s(30, lambda: pressed(rig.engine))
    assert rig.engine.state.revision == 0
    assert ("kv_format", "int4", verdict) in rig.decisions()


def test_an_operators_knob_is_left_alone_until_released(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(5, lambda: pressed(rig.engine))
    rig.engine.patch({"kv_format": "int8"}, writer="operator:anna", reason="trying something")
    rig.run_s(60, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int8"
    assert rig.daemon.status()["overrides"] == {"kv_format": "operator:anna: trying something"}
    told = [r for r in rig.parts.decisions.recent(50) if r.writer == "operator:anna"]
    assert [(r.knob, r.old, r.new, r.reason) for r in told] == [("kv_format", "native", "int8", "trying something")]
    assert rig.metric("autotune_override", knob="kv_format") == 1
    rig.engine.patch({"kv_format": "int8"}, writer="release:operator:anna")
    rig.run_s(70, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int4"
    assert rig.metric("autotune_override", knob="kv_format") == 0


def test_a_restarted_daemon_keeps_an_operators_knob_and_resets_nothing(make_rig: Any) -> None:
    first = make_rig(PRESSURE)
    first.engine.patch({"block_size": 64}, writer="operator:anna")
    first.run_s(20, lambda: pressed(first.engine))
    before = dict(first.engine.state.desired)
    first.close()
    again = make_rig(PRESSURE, engine=first.engine, clock=first.clock)
    again.loop.restore()
    again.run_s(9, lambda: pressed(again.engine))
    assert again.engine.state.desired == before
    assert again.daemon.status()["overrides"] == {"block_size": "operator:anna: "}
    assert min(tick.id for tick in again.ticks() if tick.run == again.daemon.status()["run"]) == 21


def test_state_is_restored_in_the_same_boot_only(make_rig: Any) -> None:
    first = make_rig(PRESSURE)
    first.run_s(20, lambda: pressed(first.engine))
    kept = first.parts.journal.recall("loop")
    assert kept["guard"]["asked"]["kv_format"][0] == "int4"
    first.close()
    again = make_rig(PRESSURE, engine=first.engine, clock=first.clock)
    assert again.loop.restore()
    again.loop._boot = "boot-2"
    assert not again.loop.restore()


def test_a_policy_that_raises_changes_nothing_and_is_counted(make_rig: Any) -> None:
    class Broken:
        name = "broken"
        calls = 0

        def initial_state(self) -> dict[str, Any]:
            return {}

        def decide(self, _observation: Any, _state: Any) -> Never:
            self.calls += 1
            raise ZeroDivisionError("by nothing")

    rig = make_rig()
    rig.parts.minds = replace(rig.parts.minds, policy=Broken())
    rig.run_s(15, lambda: pressed(rig.engine))
    assert rig.parts.minds.policy.calls == 15
    assert rig.engine.state.revision == 0
    assert rig.metric("autotune_policy_errors_total") == 15
    assert rig.daemon.status()["healthy"] is False
    assert "ZeroDivisionError" in rig.daemon.status()["problem"]
    assert rig.ticks()[-1].body["scenario"] == "policy_error"


def test_a_policy_that_always_asks_stops_at_the_bound(make_rig: Any) -> None:
    """Case J.37 as a whole daemon."""

    class Greedy:
        name = "greedy"

        def initial_state(self) -> dict[str, Any]:
            return {}

        def decide(self, observation: Any, state: Any) -> tuple[Decision, Any]:
            value = int(observation.tunables["max_num_seqs"] * 1.25) + 1
            offered = [v for v in (1, 2, 4, 8, 16, 32, 64, 128, 256) if v >= value] or [value]
            return Decision(Change("max_num_seqs", offered[0]), "more", "always more"), state

    rig = make_rig("guard: {rates: {step: {changes: 1000}}}\n")
    rig.parts.minds = replace(rig.parts.minds, policy=Greedy())
    rig.run_s(200, lambda: rig.engine.serve_requests(1))
    assert rig.engine.state.desired["max_num_seqs"] == 256
    applied = [entry for entry in rig.decisions() if entry[2] == "applied"]
    assert applied == [("max_num_seqs", 128, "applied"), ("max_num_seqs", 256, "applied")]


def test_constant_load_in_the_band_does_not_flap(make_rig: Any) -> None:
    rig = make_rig(PRESSURE + "tick_s: 4\nengine: {poll_s: 4}\n")
    noise = iter([0.03 * math.sin(k * 1.7) for k in range(2000)])

    def steady() -> None:
        share = 0.55 + next(noise)
        rig.engine.set_usage(share, running=int(64 * share))
        rig.engine.serve_requests(4)

    rig.run_s(60, steady)
    settled = rig.engine.state.revision
    rig.run_s(1740, steady)
    assert rig.engine.state.revision - settled <= 1


def test_wall_clock_jumps_do_not_disturb_the_tick(make_rig: Any) -> None:
    """Case K.41: the wall clock goes back two minutes, forward two, forward a day; the period stays, no burst."""
    rig = make_rig(PRESSURE)
    for jump_s in (-120, 120, 86_400):
        before = rig.loop.ticks
        rig.clock.set_wall_s(rig.clock.wall_s() + jump_s)
        rig.run_s(20, lambda: pressed(rig.engine))
        assert rig.loop.ticks - before == 20
    stamps = [tick.stamp_ns for tick in rig.ticks()]
    assert {later - earlier for earlier, later in pairwise(stamps)} == {1_000_000_000}
    rates = [tick.body["observation"]["values"]["offered_rps"] for tick in rig.ticks()[12:]]
    assert rates == pytest.approx([5.0] * 48, rel=0.15)
    assert 0 <= rig.metric("autotune_last_change_age_seconds") <= 60


def test_idle_is_a_valid_state_and_not_no_data(make_rig: Any) -> None:
    rig = make_rig()
    rig.engine.set_usage(0.0, running=0)
    rig.run_s(30)
    assert rig.daemon.status()["healthy"] is True
    values = rig.daemon.status()["values"]
    assert values["offered_rps"] == 0
    assert values["ttft_tail_s"] is None
    assert math.isnan(rig.metric("autotune_window_ttft_seconds", percentile="95"))
    assert math.isnan(rig.metric("autotune_apdex_score", metric="ttft"))
    json.dumps(rig.daemon.status(), allow_nan=True)
