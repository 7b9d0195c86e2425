"""What the loop carries from tick to tick: journalled at each of them, and taken up again after a restart."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

from autotune.deliberation import Minds, States
from engine.shapes import fits
from engine.tunables import TunableValue

_LOG: Final = logging.getLogger("autotune.loop")
_MOST_FAILURES: Final = 3


class _Kept(TypedDict):
    """What must be there of an earlier run's; see :class:`Memory`."""

    policy: dict[str, Any]
    guard: dict[str, Any]
    watch: dict[str, Any]
    instance: str | None
    replaced: dict[str, TunableValue]


@dataclass
class Memory:
    """``instance``: the engine that the policy's state is about. ``replaced``: what the daemon's own changes replaced,
    by knob. ``failures``: ticks in a row that failed with these states; with those of an earlier run, all but one too
    many as long as no tick has lived with them.
    """

    states: States
    instance: str | None = None
    replaced: dict[str, TunableValue] = field(default_factory=dict)
    failures: int = 0

    def to_json(self, boot: str, policy: str) -> dict[str, Any]:
        """For :func:`restored`; ``policy``: the name of whose state it is."""
        states = self.states
        return {
            "boot": boot, "name": policy, "policy": states.policy, "guard": states.guard, "watch": states.watch,
            "instance": self.instance, "replaced": self.replaced,
        }  # fmt: skip

    def lived(self) -> None:
        """A tick went well."""
        self.failures = 0

    def failed(self, minds: Minds) -> None:
        """A tick failed: states that may be why are begun anew, as they would fail every tick from now on, and after
        every restart.
        """
        self.failures += 1
        if self.failures >= _MOST_FAILURES:
            _LOG.warning("the states of policy, guard and watch are begun anew")
            self.states, self.failures = minds.initial_states(), 0


def restored(kept: object, minds: Minds, boot: str) -> Memory | None:
    """What an earlier run of this boot left, None for anything else: monotonic times mean nothing after another boot.

    Another policy starts with a state of its own.
    """
    if not isinstance(kept, dict) or kept.get("boot") != boot:
        return None
    # A version without effects kept no state of their watch; each replaces what it cannot use.
    kept = {**kept, "watch": kept.get("watch") or {}, "replaced": kept.get("replaced") or {}}
    if not fits(kept, _Kept):
        _LOG.warning("what the last run left in the journal cannot be used; all begins anew")
        return None
    policy = kept["policy"] if kept.get("name") == minds.policy.name else minds.initial_states().policy
    states = States(policy, kept["guard"], kept["watch"])
    return Memory(states, kept["instance"], kept["replaced"], failures=_MOST_FAILURES - 1)
