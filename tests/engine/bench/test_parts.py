"""Times of parts exclude the parts inside them, and add up."""

from __future__ import annotations

import pytest

from engine.bench.parts import PartTimes
from engine.clock import ManualClock


class Machine:
    """Something with parts inside parts, on a clock that only they move."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def whole(self) -> int:
        self._clock.advance_s(1e-6)
        self.half()
        self.half()
        self._clock.advance_s(2e-6)
        return 7

    def half(self) -> None:
        self._clock.advance_s(10e-6)

    def broken(self) -> None:
        self._clock.advance_s(5e-6)
        raise ValueError("no")


def test_inner_parts_are_not_counted_twice() -> None:
    clock = ManualClock()
    machine, parts = Machine(clock), PartTimes(clock.now_ns)
    parts.wrap(machine, "whole", "rest")
    parts.wrap(machine, "half", "inner")
    clock.advance_s(1.0)
    assert machine.whole() == 7
    clock.advance_s(1.0)
    machine.whole()
    assert parts.spent_us(2) == {"inner": 20.0, "rest": 3.0}
    parts.reset()
    assert parts.spent_us(1) == {}


def test_a_part_that_fails_is_left_all_the_same() -> None:
    clock = ManualClock()
    machine, parts = Machine(clock), PartTimes(clock.now_ns)
    parts.wrap(machine, "broken", "broken")
    parts.wrap(machine, "half", "inner")
    with pytest.raises(ValueError, match="no"):
        machine.broken()
    clock.advance_s(1.0)
    machine.half()
    assert parts.spent_us(1) == {"inner": 10.0, "broken": 5.0}
