"""Advice scored on a simulated engine: what the daemon recorded while it did all but the write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.advice import AdviceReader
from autotune.cli.score_advice import _lines
from autotune.journal_file import Tick
from autotune.run_document import run_document
from autotune.wiring import check_rules
from engine.clock import ManualClock
from engine.tunable_state import Patch
from engine.tunables import default_values
from envs.arrivals_feed import TraceFeed
from envs.features import FEATURES
from envs.ledger import Ledger
from envs.profile import read_profile
from envs.signals import Targets
from envs.simulator import SimOptions, Simulator
from envs.spaces import Observation
from policies.advice_score import Moment, drawn, score
from policies.load import Lengths

PROFILE = Path(__file__).parents[2] / "envs/profiles/llama3_8b_l4_estimated.yaml"
TARGETS = Targets(5.0, 0.2, 0.95)
NATIVE, INT4 = default_values(), {**default_values(), "kv_format": "int4"}


def moments(seconds: int, rate_rps: float, advised: dict[str, Any]) -> list[Moment]:
    prompt, output = Lengths.of(810, 1500), Lengths.of(143, 400)
    return [Moment(float(second), rate_rps, prompt, output, NATIVE, advised) for second in range(seconds)]


def test_advice_that_helps_saves_seconds_and_preemptions_and_costs_quality() -> None:
    profile = read_profile(PROFILE)
    recorded = moments(120, 2.5, INT4)
    trace = drawn(recorded, profile.model.max_model_len, seed=0)
    assert 220 < len(trace.requests) < 380
    was = score(recorded, trace, profile, TARGETS, advised=False)
    advised = score(recorded, trace, profile, TARGETS, advised=True)
    assert was == score(recorded, trace, profile, TARGETS, advised=False)
    assert advised.over_s < was.over_s - 5
    assert advised.preemptions < was.preemptions
    assert was.loss_per_token == 0 < advised.loss_per_token
    calm = moments(60, 0.2, NATIVE)
    quiet = score(calm, drawn(calm, 4096, seed=0), profile, TARGETS, advised=True)
    assert (quiet.over_s, quiet.preemptions) == (0, 0)


def test_nothing_arrived_is_said() -> None:
    with pytest.raises(ValueError, match="no arrivals"):
        drawn(moments(20, 0.0, INT4), 4096, seed=0)


def tick(second: int, proposal: Any = None, verdict: str = "nothing", mode: str = "advise") -> Tick:
    seen = Observation(second * 10**9, dict.fromkeys((f.name for f in FEATURES), 1.0), NATIVE, frozenset(), 60.0, "a")
    body = {"mode": mode, "observation": seen.to_json(), "proposal": proposal, "verdict": [verdict, ""]}
    return Tick(second, "run", 0.0, second * 10**9, acted=False, body=body)


def test_advice_holds_until_nothing_has_been_wanted_for_a_while() -> None:
    int8 = ["kv_format", "int8"]
    ticks = [
        tick(1),
        tick(2, int8, "warming_up"),
        tick(3, int8, "allowed"),
        tick(4, int8, "not_taken"),
        tick(5),
        tick(34),
        tick(35),
        tick(36, mode="active"),
        Tick(37, "run", 0.0, 0, acted=False, body={"mode": "advise", "scenario": "engine_gone"}),
        tick(300),
    ]
    reader = AdviceReader()
    read = reader.read(ticks)
    assert [moment.advised["kv_format"] for moment in read] == [
        "native", "native", "int8", "int8", "int8", "int8", "native", "native",
    ]  # fmt: skip
    assert (reader.advised, reader.left_out) == (1, 2)
    assert read[-1].at_s - read[-2].at_s == 1, "a long silence is left out"


def test_a_format_is_advised_as_far_as_the_quality_budget_bears() -> None:
    part = tick(1, ["kv_format", "int4"], "allowed")
    part.body["let_through"] = ["kv_format", "int8"]
    assert AdviceReader().read([part])[0].advised["kv_format"] == "int8"


class SimulatedControl:
    """A simulated engine as a daemon's control socket sees it."""

    def __init__(self, clock: ManualClock, simulator: Simulator) -> None:
        self._clock, self._simulator = clock, simulator
        self.began_ns = clock.now_ns()

    def stats(self) -> Any:
        self._simulator.run_until(self._clock.now_ns() - self.began_ns)
        return self._simulator.stats()

    def tunables(self) -> Any:
        return self._simulator.core.tunables_json()

    def patch(self, changes: Any, *, writer: str, reason: str = "", if_revision: int | None = None) -> Any:
        return self._simulator.core.patch(Patch(changes, writer, reason, if_revision)).to_json()


def test_a_daemon_in_advise_mode_is_scored(make_rig: Any, autotune: Any) -> None:
    profile = read_profile(PROFILE)
    trace = drawn(moments(100, 2.5, NATIVE), profile.model.max_model_len, seed=7)
    options = SimOptions(profile.pool_bytes, profile.model.max_model_len, prefix_cache=False)
    simulator = Simulator(profile.groups(), profile.latency_model(), options, TraceFeed(trace), ledger=Ledger(TARGETS))
    clock = ManualClock(start_ns=5_000_000_000)
    text = "mode: advise\npolicy: {rules: literature, quality_budget: null}\ntargets: {ttft_s: 5, tbt_s: 0.2}\n"
    rig = make_rig(text, engine=SimulatedControl(clock, simulator), clock=clock)
    rig.parts.journal.start_run(rig.loop.run_id, run_document(rig.config, check_rules(rig.config)))
    rig.run_s(100)
    assert simulator.core.tunables_json()["revision"] == 0, "advise writes nothing"
    journal = ("--journal", str(rig.parts.journal.path))
    code, out, err = autotune("score-advice", "--profile", str(PROFILE), "--draws", "1", "--json", *journal)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["simulated"] is True
    assert document["changes_advised"] >= 1
    assert document["saved"]["over_s"][0] > 5
    lines = _lines(document)
    assert len(lines) == 4
    assert all(line.startswith("simulated") for line in lines)
    for wrong, told in (
        (("1-3",), "at least 10 are needed"),
        (("x",), "a range such as"),
        (("--profile", "/nowhere.yaml"), "/nowhere.yaml"),
    ):
        given = (*wrong, *([] if "--profile" in wrong else ["--profile", str(PROFILE)]))
        code, _, err = autotune("score-advice", *given, *journal)
        assert code in {1, 2}
        assert len(err.splitlines()) == 1
        assert told in err
    assert "name the engine's profile" in autotune("score-advice", *journal)[2]
