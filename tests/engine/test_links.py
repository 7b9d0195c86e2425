"""The emulated link keeps time like a real one: in order, both directions at once, urgent copies first."""

from __future__ import annotations

import pytest
import torch

from engine.clock import ManualClock
from engine.link_times import EmulatedLink
from engine.links import EmulatedMover
from engine.transfers import Direction, HostLink, Transfer
from kernels import ops

IN, OUT = Direction.IN, Direction.OUT


def ms(clock: ManualClock) -> float:
    return clock.now_ns() / 1e6


def mover() -> tuple[EmulatedMover, ManualClock, torch.Tensor, torch.Tensor]:
    """1 MB/s: a thousand bytes take a millisecond."""
    clock = ManualClock()
    device = torch.arange(8192, dtype=torch.int32).to(torch.uint8)
    host = torch.zeros(8192, dtype=torch.uint8)
    return EmulatedMover([device], [host], HostLink(1e6, 1e6), clock, ops.copy_bytes), clock, device, host


def test_copies_are_made_and_reported_when_their_time_has_come() -> None:
    emulated, clock, device, host = mover()
    emulated.submit([Transfer(1, OUT, 0, ((0, 4096, 1000),)), Transfer(2, OUT, 0, ((1024, 0, 2000),))])
    assert torch.equal(host[4096:5096], device[:1000])
    assert torch.equal(host[:2000], device[1024:3024])
    assert emulated.arrived() == []
    assert emulated.wait_ns() == 1_000_000
    clock.advance_s(0.001)
    assert emulated.arrived() == [1]
    assert emulated.wait_ns() == 2_000_000  # one after the other
    clock.advance_s(0.005)
    assert emulated.arrived() == [2]
    assert emulated.wait_ns() == 0


def test_directions_do_not_wait_for_each_other() -> None:
    emulated, clock, _, _ = mover()
    emulated.submit([Transfer(1, OUT, 0, ((0, 0, 3000),)), Transfer(2, IN, 0, ((4096, 4096, 1000),))])
    clock.advance_s(0.001)
    assert emulated.arrived() == [2]
    clock.advance_s(0.002)
    assert emulated.arrived() == [1]


def test_an_urgent_copy_waits_for_the_one_in_progress_and_delays_the_others() -> None:
    clock = ManualClock()
    line = EmulatedLink(HostLink(1e6, 1e6), clock)
    first, second = line.start(IN, 1000), line.start(IN, 1000)
    clock.advance_s(0.0005)
    assert line.start_urgent(IN, 500) == 1_500_000
    assert (first.due_ns, second.due_ns) == (1_000_000, 2_500_000)
    assert line.start_urgent(IN, 500) == 2_000_000  # behind the other urgent one only
    assert second.due_ns == 3_000_000
    assert line.start(IN, 1000).due_ns == 4_000_000
    assert line.start_urgent(OUT, 500) == 1_000_000  # the other direction is free


def test_no_link_without_a_rate() -> None:
    with pytest.raises(ValueError, match="above 0"):
        HostLink(0.0, 1.0)
