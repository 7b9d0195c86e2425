"""Rules that decide in place of a policy that could not be used when the daemon started; and why it could not."""

from __future__ import annotations

from policies.base import Policy
from policies.delegating import Delegating


class StandIn(Delegating):
    """``why``: the wanted policy was refused, in one line."""

    def __init__(self, policy: Policy, why: str) -> None:
        super().__init__(policy)
        self.why = why


def refusal_of(policy: Policy) -> str:
    """Why the policy that was asked for is not the one that decides; empty where it is."""
    return policy.why if isinstance(policy, StandIn) else ""
