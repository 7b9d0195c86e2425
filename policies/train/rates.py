"""At which rate a source is worth learning from: where static native serves most requests inside their targets.

Far below it nothing needs to be done, far above it nothing helps: there every policy gets the same reward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from envs.arrivals_feed import TraceFeed
from envs.ledger import Ledger
from envs.profile import Profile
from envs.signals import Targets
from envs.simulator import SimOptions, Simulator
from envs.workload.trace import Trace

_STEPS: Final = 12  # each half as high again as the next


def peak_rps(
    profile: Profile, at_rate: Callable[[float], Trace], options: SimOptions, targets: Targets, most_rps: float
) -> float:
    """The mean rate in requests per second, of a dozen up to ``most_rps``, at which native storage completes most
    requests per second inside ``targets``; the lowest of the highest where several do. ``at_rate``: the source's
    requests at a rate.
    """
    best_rps, best = 0.0, -1.0
    for step in reversed(range(_STEPS)):
        rate_rps = most_rps / 1.5**step
        good_rps = rate_rps * inside_share(profile, at_rate(rate_rps), options, targets)
        if good_rps > best:
            best_rps, best = rate_rps, good_rps
    return best_rps


def inside_share(profile: Profile, trace: Trace, options: SimOptions, targets: Targets) -> float:
    """Share of a trace's requests that are completed inside all targets under ``options``."""
    ledger = Ledger(targets)
    Simulator(profile.groups(), profile.latency_model(), options, TraceFeed(trace), ledger=ledger).drain()
    return ledger.take().good / len(trace.requests)
