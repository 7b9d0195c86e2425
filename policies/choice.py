"""Which policy ``auto`` took and why not the others: light enough for whoever only shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from engine.text import one_line
from policies.base import Policy
from policies.delegating import Delegating

Reason = Literal[
    "unreadable", "mismatch", "profile", "no-profile", "unscored", "over-budget", "no-gain", "second",
    "ambiguous", "unjudged", "missing", "unbuildable",
]  # fmt: skip
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
TAKEN: Final = "taken"
_MOST_CHARS: Final = 1000


@dataclass(frozen=True)
class Refused:
    """What was not taken: ``rules``, ``predictor``, the folder of a bundled policy (its name, where there is none), or
    the file of a verdict that cannot be used; the kind of reason; and the reason in one line. Names of files may hold
    any bytes: what is not printable is escaped here, since labels, logs and documents are UTF-8.
    """

    name: str
    reason: Reason
    why: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _legible(self.name))
        object.__setattr__(self, "why", _legible(self.why))


def _legible(text: str) -> str:
    fit = (one if one.isprintable() or one.isspace() else ascii(one)[1:-1] for one in text)
    return one_line("".join(fit), _MOST_CHARS)


@dataclass(frozen=True)
class Choice:
    """``taken``: the policy's name; ``bundled``: of its folder, None for what is not bundled; ``why``, in one line.
    ``kind``: ``rules``, ``predictor`` or ``learned``.
    """

    taken: str
    bundled: str | None
    why: str
    refused: tuple[Refused, ...]
    kind: str

    def outcomes(self) -> list[tuple[str, str]]:
        """For a metric: who, and what became of it; each pair once."""
        pairs = [(self.bundled or self.kind, TAKEN), *((one.name, one.reason) for one in self.refused)]
        return list(dict.fromkeys(pairs))

    def lines(self) -> Iterator[str]:
        """For logs and terminals."""
        yield f"auto takes {self.taken}: {self.why}"
        for one in self.refused:
            yield f"auto refused {one.name} ({one.reason}): {one.why}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "taken": self.taken,
            "bundled": self.bundled,
            "kind": self.kind,
            "why": self.why,
            "refused": [vars(one) for one in self.refused],
        }


class AutoPolicy(Delegating):
    """The policy that was taken; ``choice`` says how it came to that."""

    def __init__(self, policy: Policy, choice: Choice) -> None:
        super().__init__(policy)
        self.choice = choice


def choice_of(policy: Policy | None) -> Choice | None:
    """What ``auto`` chose, None for a policy that was named."""
    return policy.choice if isinstance(policy, AutoPolicy) else None
