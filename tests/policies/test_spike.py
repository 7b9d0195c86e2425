"""The check of how soon a policy is back inside the targets after a threefold load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envs.profile import read_profile
from envs.signals import Targets
from envs.simulated import DEFAULT_PROFILE
from policies.executors import Serial
from policies.play import Played, Row
from policies.spike import CALM_S, SPIKE_S, Spike, back_inside, spikes
from policies.steady import Bench, SteadyLoad

TARGETS = Targets(1.0, 0.1)
BENCH = Bench(read_profile(DEFAULT_PROFILE), SteadyLoad(), 2.65, TARGETS)
FINE = Row(0.0, 1.0, 1, 0, 0.5, {}, 0.5, 0.05, 1.0)


def played(*bad: tuple[float, Row]) -> Played:
    """Rows every 2 s, fine but for those given, by seconds after the spike."""
    odd = dict(bad)
    times = [2.0 * i for i in range(1, round((CALM_S + SPIKE_S) / 2) + 1)]
    rows = [replace(odd.get(at - CALM_S, FINE), at_s=at) for at in times]
    return Played("p", rows=rows)


@pytest.mark.parametrize(
    ("bad", "after_s"),
    [
        (FINE, 0.0),
        (replace(FINE, ttft_tail_s=1.5), 8.0),
        (replace(FINE, tbt_tail_s=0.2), 8.0),
        (replace(FINE, ttft_tail_s=None, waiting=3), 8.0),
        (replace(FINE, ttft_tail_s=None), 0.0),  # nobody came
    ],
)
def test_the_last_interval_outside_counts(bad: Row, after_s: float) -> None:
    assert back_inside(BENCH, 2.0, played((4.0, bad), (8.0, bad))) == after_s


def test_before_the_spike_nothing_counts_and_late_ones_are_no_recovery() -> None:
    late = replace(FINE, ttft_tail_s=9.0)
    assert back_inside(BENCH, 2.0, played((-2.0, late), (0.0, late))) == 0.0
    assert back_inside(BENCH, 2.0, played((44.0, late))) == 44.0
    assert back_inside(BENCH, 2.0, played((SPIKE_S, late))) is None


def test_a_policy_is_asked_for_no_more_than_foresight_reaches() -> None:
    assert Spike(0.3, 10.0, 0).is_met
    assert not Spike(0.3, 12.0, 0).is_met
    assert not Spike(0.3, None, 0, oracle_s=8.0, asked=True).is_met
    assert Spike(0.3, None, 0, oracle_s=12.0, asked=True).is_met
    assert Spike(0.3, 14.0, 0, oracle_s=None, asked=True).is_met


def test_a_small_spike_is_met_without_foresight() -> None:
    bench = Bench.of(read_profile(DEFAULT_PROFILE), SteadyLoad())
    calls: list[None] = []
    (one,) = spikes(bench, "default", Serial(), bases=[0.25], done=lambda: calls.append(None))
    assert one.is_met
    assert not one.asked
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_where_native_drowns_foresight_is_asked() -> None:
    bench = Bench.of(read_profile(DEFAULT_PROFILE), SteadyLoad())
    (one,) = spikes(bench, "none", Serial(), bases=[0.5])
    assert one.asked
    assert one.policy_s is None or one.policy_s > 10.0
