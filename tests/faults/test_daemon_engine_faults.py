"""The daemon when the engine misbehaves: it holds, says so, and goes on when the engine does."""

from __future__ import annotations

import math
from typing import Any, Never

PRESSURE = "policy: {rules: literature, quality_budget: null}\n"


def pressed(engine: Any) -> None:
    engine.set_usage(0.95, running=60, waiting=30)
    engine.serve_requests(5, ttft_s=3.0, gap_s=0.2)


def test_engine_that_vanishes_is_told_and_nothing_is_read_as_zero(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(8, lambda: pressed(rig.engine))
    rig.engine.alive = False
    rig.run_s(30)
    status = rig.daemon.status()
    assert status["engine"] == "gone"
    assert status["healthy"] is False
    assert "no engine listens" in status["problem"]
    assert rig.metric("autotune_engine_health", state="gone") == 1
    assert rig.metric("autotune_kv_cache_usage") is None
    assert rig.ticks()[-1].body["scenario"] == "engine_gone"
    assert rig.loop.ticks == 38


def test_engine_that_comes_back_as_another_instance_gets_a_full_window_first(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(20, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int4"
    rig.engine.alive = False
    rig.run_s(3)
    rig.engine.alive = True
    rig.engine.restart()
    rig.run_s(9.5, lambda: pressed(rig.engine))
    assert rig.engine.state.revision == 0, "acted on less than one window of the new instance"
    rig.run_s(5, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int4"
    assert rig.metric("autotune_engine_restarts_total") == 1


def test_effect_of_a_change_whose_engine_restarted_is_unknown(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(12, lambda: pressed(rig.engine))
    changed = next(tick for tick in rig.ticks() if tick.body.get("written"))
    rig.engine.restart()
    rig.run_s(5, lambda: pressed(rig.engine))
    effect = next(tick for tick in rig.ticks() if tick.id == changed.id).effect
    assert "restarted" in effect["unknown"]


def test_one_missed_poll_loses_nothing(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(8, lambda: pressed(rig.engine))
    rig.engine.alive = False
    rig.run_s(1)
    rig.engine.alive = True
    rig.run_s(4, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "int4"


def test_a_reading_that_cannot_be_true_is_refused_and_counted(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(4, lambda: pressed(rig.engine))
    rig.engine.figures.gauges.kv_usage = math.nan
    rig.run_s(1)
    assert rig.daemon.status()["engine"] == "invalid"
    assert "kv_usage" in rig.daemon.status()["problem"]
    assert rig.metric("autotune_metrics_invariant_violations_total") == 1
    rig.run_s(8, lambda: pressed(rig.engine))
    assert rig.daemon.status()["engine"] == "ok"


def test_a_counter_that_falls_never_makes_an_exported_one_fall(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(4, lambda: rig.engine.serve_requests(5))
    before = rig.metric("autotune_requests_total", outcome="completed")
    assert before == 20
    rig.engine.figures.counters.requests_completed -= 7
    rig.run_s(1)
    assert rig.metric("autotune_requests_total", outcome="completed") == before
    assert rig.metric("autotune_metrics_invariant_violations_total") == 1


def test_figures_that_stand_still_are_stale_and_decide_nothing(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.engine.set_usage(0.1)
    rig.run_s(12, lambda: rig.engine.serve_requests(2))
    revision = rig.engine.state.revision
    rig.engine.frozen = True
    rig.engine.set_usage(0.95, running=60, waiting=30)
    rig.run_s(30)
    assert rig.daemon.status()["engine"] == "stale"
    assert rig.engine.state.revision == revision


def test_a_write_in_between_is_a_conflict_and_never_overwritten(make_rig: Any) -> None:
    rig = make_rig(PRESSURE)
    rig.run_s(10, lambda: pressed(rig.engine))
    original = rig.engine.patch

    def raced(changes: Any, **options: Any) -> Any:
        rig.engine.patch = original
        original({"kv_format": "k8v4"}, writer="operator:anna")
        return original(changes, **options)

    rig.engine.patch = raced
    rig.run_s(20, lambda: pressed(rig.engine))
    assert rig.engine.state.desired["kv_format"] == "k8v4"
    assert ("kv_format", "int4", "conflict") in rig.decisions()


def test_an_answer_lost_on_the_way_is_found_out_at_the_next_tick(make_rig: Any) -> None:
    from engine.control_client import EngineUnreachable

    rig = make_rig(PRESSURE)
    rig.run_s(10, lambda: pressed(rig.engine))
    original = rig.engine.patch

    def deaf(changes: Any, **options: Any) -> Never:
        rig.engine.patch = original
        original(changes, **options)
        raise EngineUnreachable("/fake.sock: no answer within 2 s")

    rig.engine.patch = deaf
    rig.run_s(20, lambda: pressed(rig.engine))
    assert ("kv_format", "int4", "lost") in rig.decisions()
    assert rig.engine.state.writers["kv_format"].revision == 1, "written twice"
    assert rig.daemon.status()["overrides"] == {}
