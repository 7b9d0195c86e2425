"""Who a run begins from and is compared with: rules, or the predictor, made for the targets of each episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from envs.profile import Profile
from envs.signals import Targets
from policies.advisor import PREDICTOR
from policies.base import Policy
from policies.predictor_of import predictor_of
from policies.rules import load_rules
from policies.threshold import ThresholdPolicy

USUAL: Final = "default"


@dataclass
class Teacher:
    """``make`` is called once for each targets that come up: sources have their own."""

    name: str
    make: Callable[[Targets], Policy]
    _made: dict[Targets, Policy] = field(default_factory=dict)

    def policy(self, targets: Targets) -> Policy:
        """The policy for these targets."""
        if targets not in self._made:
            self._made[targets] = self.make(targets)
        return self._made[targets]


def teacher_for(name: str | None, profile: Profile) -> Teacher:
    """A preset, a rules file or ``predictor``; the usual rules for None.

    Raises RuleError, ValueError for a pool that is too small for the model.
    """
    if name == PREDICTOR:
        return Teacher(PREDICTOR, lambda targets: predictor_of(profile, targets))
    rules = ThresholdPolicy(load_rules(name or USUAL))
    return Teacher(rules.name, lambda _: rules)
