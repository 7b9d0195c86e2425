"""What the guard is told and what it says: contexts and verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from envs.port import Change
from envs.reward import Charge
from envs.spaces import Observation

GuardState = dict[str, Any]
"""JSON-able; journalled and restored. See :meth:`policies.guard.Guard.initial_state`."""


class VerdictCode(StrEnum):
    """Why a proposal may or may not go on. NOTHING and NO_CHANGE are no decisions: neither logged nor counted."""

    ALLOWED = "allowed"
    NOTHING = "nothing"  # the policy proposed nothing
    NO_CHANGE = "no_change"  # the knob is there already, or where the proposal would be clamped to
    UNKNOWN_KNOB = "unknown_knob"  # not declared, or the engine does not tell where it is
    NOT_ALLOWED = "not_allowed"  # not one of the knob's values, or outside the configured ones
    WARMING_UP = "warming_up"  # less than one full window has been seen
    OVERRIDE = "override"  # somebody else wrote the knob last
    NOT_TAKEN = "not_taken"  # asked for already and the engine does not show it: an outer limit, or advise mode
    DWELL = "dwell"  # the knob was moved too recently
    RATE_LIMIT = "rate_limit"  # too many changes of its cost class lately
    INFEASIBLE = "infeasible"  # the state cannot be reached or held
    FAILED_BEFORE = "failed_before"  # rolled back under the same load
    COOL_DOWN = "cool_down"  # its knob was rolled back too recently
    CANARY = "canary"  # a first step of its knob has not been judged yet
    OVER_BUDGET = "over_budget"  # it may lose more quality than the budget bears, or nobody knows how much
    HANDED_BACK = "handed_back"  # no verdict on the proposal: the guard's own change, for the quality budget


@dataclass(frozen=True)
class Verdict:
    """``change`` is what may be written (a number beyond a bound was clamped to it, a format to what the quality budget
    bears), or, handed back, the guard's own; None otherwise. ``is_short``: the budget does not bear the proposal as it
    stands.
    """

    code: VerdictCode
    text: str
    change: Change | None = None
    is_short: bool = False

    @property
    def allowed(self) -> bool:
        return self.code is VerdictCode.ALLOWED

    @property
    def is_decision(self) -> bool:
        """Whether it is worth logging and counting."""
        return self.code not in {VerdictCode.NOTHING, VerdictCode.NO_CHANGE}


@dataclass(frozen=True)
class Writer:
    """Who wrote a knob last, as the control API tells it. ``until_ns``: when it ends by itself, in the observer's
    clock; None for what has to be given back.
    """

    writer: str
    revision: int
    reason: str = ""
    until_ns: int | None = None


@dataclass(frozen=True)
class GuardContext:
    """What the guard may look at.

    ``writers``: by knob; one that nobody wrote since the engine started is missing. ``released``: knobs that the
    operator has given back, with the revision of the write that is thereby forgiven. ``charge``: what was generated
    since the last tick and what it loses, for the quality budget; without it nothing is earned and nothing spent.
    ``barred``: by knob or by ``knob=value``, what :mod:`policies.rollback` objects to. ``is_rollback``: the proposal
    takes back a change that missed, so it need not wait for its knob to have dwelt.
    """

    observation: Observation
    writers: Mapping[str, Writer] = field(default_factory=dict)
    released: Mapping[str, int] = field(default_factory=dict)
    charge: Charge | None = None
    barred: Mapping[str, tuple[VerdictCode, str]] = field(default_factory=dict)
    is_rollback: bool = False
