"""Loads that hold still, at levels of what native storage can serve: for checks of how a policy behaves over the load.

Arrivals are evenly spaced and lengths equal but for a relative noise: what a policy changes is its own doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envs.profile import Profile
from envs.signals import Targets
from envs.simulator import SimOptions
from envs.workload.arrivals import Envelope
from envs.workload.generators import Workload, generate
from envs.workload.lengths import Lengths
from envs.workload.trace import Trace, from_requests
from policies.evaluation.calibration import sustained_rps, unloaded_targets

MOST_TOKENS = 1_000_000  # of a prompt or an output
_SAMPLE_S = 300.0


@dataclass(frozen=True)
class SteadyLoad:
    """Requests of one kind. ``noise``: relative deviation of gaps and lengths, 0.05 for 5 %."""

    prompt_tokens: int = 810
    output_tokens: int = 143
    noise: float = 0.05

    def __post_init__(self) -> None:
        if not all(1 <= tokens <= MOST_TOKENS for tokens in (self.prompt_tokens, self.output_tokens)):
            raise ValueError(
                f"a load needs prompts and outputs of 1 to {MOST_TOKENS} tokens, "
                f"got {self.prompt_tokens:.6g} and {self.output_tokens:.6g}"
            )
        if not 0 < self.noise < 1:
            raise ValueError(f"a load needs a noise between 0 and 1, got {self.noise:g}")

    def workload(self, phases: Sequence[tuple[float, float]]) -> Workload:
        """``phases``: (seconds, requests per second)."""
        return Workload(
            "steady", "a load that holds still", "nothing measured", Envelope.phases(*phases), self.noise,
            Lengths(self.prompt_tokens, self.noise), Lengths(self.output_tokens, self.noise),
        )  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """A profile's engine under such a load: what native serves of it, and the targets that follow."""

    profile: Profile
    load: SteadyLoad
    capacity_rps: float
    targets: Targets
    pool_bytes: int | None = None

    @classmethod
    def of(cls, profile: Profile, load: SteadyLoad, pool_bytes: int | None = None) -> Bench:
        """Raises ValueError when the engine cannot serve such a request at all."""
        options = SimOptions(
            pool_bytes or profile.pool_bytes, profile.model.max_model_len, prefix_cache=False, max_waiting=1 << 30
        )
        requests = generate(load.workload([(_SAMPLE_S, 1.0)]), duration_s=_SAMPLE_S, seed=0)
        trace: Trace = from_requests("steady", requests.requests)
        capacity = sustained_rps(profile, trace, options)
        return cls(profile, load, capacity, unloaded_targets(profile, trace, options), pool_bytes)
