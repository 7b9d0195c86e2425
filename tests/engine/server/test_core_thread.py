from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import Brake

from engine.admission import AdmissionError
from engine.clock import ManualClock
from engine.core_thread import EngineThread
from engine.request import FinishReason, Request, SamplingParams
from engine.request_delta import RequestDelta

Build = Callable[..., Any]


class Collector:
    """Deltas in the order of delivery, one list per step."""

    def __init__(self) -> None:
        self.batches: list[list[RequestDelta]] = []
        self.done = threading.Event()
        self._wanted = 1_000_000

    def __call__(self, deltas: list[RequestDelta]) -> None:
        self.batches.append(deltas)
        if sum(delta.finish_reason is not None for batch in self.batches for delta in batch) >= self._wanted:
            self.done.set()

    def wait(self, requests: int) -> None:
        self._wanted = requests
        self([])
        assert self.done.wait(60)


def ask(name: str, max_tokens: int = 6) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0)


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def start(new_engine: Build, collector: Collector) -> Iterator[Callable[..., tuple[Any, EngineThread]]]:
    threads = []

    def begin(**options: Any) -> tuple[Any, EngineThread]:
        engine = new_engine(real_clock=True, **options)
        threads.append(EngineThread(engine.core, collector))
        threads[-1].start()
        return engine, threads[-1]

    yield begin
    for thread in threads:
        assert thread.stop(60)


def test_one_delivery_per_step_however_many_requests(start: Any, collector: Collector) -> None:
    engine, thread = start()
    gate = threading.Event()
    thread.call(lambda _core: gate.wait(60))
    added = [thread.call(lambda core, name=name: core.add(ask(name))) for name in "abcd"]
    gate.set()
    for future in added:
        future.result(60)
    collector.wait(4)
    steps = [batch for batch in collector.batches if batch]
    assert len(steps) == len(engine.runner.plans) == 6
    assert all([delta.request_id for delta in batch] == list("abcd") for batch in steps)


def test_a_command_raises_in_its_caller_only(start: Any, collector: Collector) -> None:
    _, thread = start(max_waiting=0)
    with pytest.raises(AdmissionError):
        thread.call(lambda core: core.add(ask("a"))).result(60)
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda _core: 1 / 0).result(60)
    assert thread.is_alive
    assert collector.batches == []


def test_abort_takes_effect_before_the_next_step(start: Any, collector: Collector) -> None:
    engine, thread = start()
    inside, go_on = threading.Event(), threading.Event()

    def hold(_plan: object) -> None:
        inside.set()
        assert go_on.wait(60)

    engine.runner.before = hold
    thread.call(lambda core: core.add(ask("a", 50)))
    thread.call(lambda core: core.add(ask("b", 3)))
    assert inside.wait(60)
    aborted = thread.call(lambda core: (core.abort("a"), core.stats().gauges.running))
    engine.runner.before = lambda _plan: None
    go_on.set()
    was_there, running = aborted.result(60)
    assert was_there
    assert running <= 1
    collector.wait(1)
    assert sum(delta.request_id == "a" for batch in collector.batches for delta in batch) <= 1


def test_idle_uses_no_processor(start: Any, collector: Collector) -> None:
    _, thread = start()
    thread.call(lambda core: core.add(ask("a"))).result(60)
    collector.wait(1)
    thread.call(lambda _core: None).result(60)
    clock = time.pthread_getcpuclockid(thread._thread.ident)
    before = time.clock_gettime(clock)
    threading.Event().wait(0.2)
    assert time.clock_gettime(clock) - before < 0.01


def test_stop_ends_every_request_and_refuses_new_ones(start: Any, collector: Collector) -> None:
    engine, thread = start()
    engine.runner.before = Brake()
    thread.call(lambda core: core.add(ask("a", 900))).result(60)
    assert thread.stop(60)
    last = collector.batches[-1][-1]
    assert (last.request_id, last.finish_reason) == ("a", FinishReason.ABORT)
    assert not thread.is_alive
    with pytest.raises(AdmissionError, match="shutting down"):
        thread.call(lambda core: core.add(ask("b"))).result(60)
    assert thread.call(lambda core: core.stats().counters.requests_aborted).result(60) == 1


def test_commands_come_between_pieces_of_background_work(start: Any, collector: Collector) -> None:
    engine, thread = start(kv_format="native")
    thread.call(lambda core: core.add(Request("a", [5] * 700, SamplingParams(max_tokens=1), 0))).result(60)
    collector.wait(1)
    patch = thread.call(lambda core: core.has_background_work)
    patch.result(60)
    assert thread.call(lambda core: core.stats().gauges.running).result(60) == 0
    assert engine.core.broken is None


def test_it_tells_how_long_it_has_been_at_one_thing(new_engine: Build, collector: Collector) -> None:
    clock = ManualClock()
    thread = EngineThread(new_engine(real_clock=True).core, collector, clock)
    assert thread.busy_s == 0.0
    thread.start()
    begun, free = threading.Event(), threading.Event()

    def hang(_: Any) -> None:
        begun.set()
        assert free.wait(60)

    clock.advance_s(5.0)  # nothing to do: not busy
    hanging = thread.call(hang)
    assert begun.wait(60)
    clock.advance_s(61.0)
    assert thread.busy_s == 61.0
    free.set()
    hanging.result(60)
    thread.call(lambda _: clock.advance_s(3.0)).result(60)  # each thing counts alone
    assert thread.busy_s <= 3.0
    assert thread.stop(60)
    assert thread.busy_s == 0.0
