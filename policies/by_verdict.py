"""Who decides by a verdict of an evaluation on the loaded profile: the best judged policy that can be used here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from engine.clock import Clock
from policies.advisor import PREDICTOR, advisors
from policies.base import Policy
from policies.card import Card, PolicyFileError, check_name, read_card, short_line
from policies.choice import AutoPolicy, Choice, Reason, Refused
from policies.learned import load_learned
from policies.profile_verdict import JUDGED_RULES, LEARNED, RULES, Judged, ProfileVerdict
from policies.rules import load_rules
from policies.threshold import ThresholdPolicy

Maker = Callable[[], Policy]
_WhyNot = tuple[Reason, str]
_UNKNOWN: Final[_WhyNot] = "unjudged", "the verdict on this profile does not know it, or knows it with other weights"


@dataclass(frozen=True)
class Shelf:
    """What there is to choose from. ``folders``: of bundled policies. ``rules``: taken when nothing else is, and the
    fallback of learned policies. ``predictor``: makes one for whoever chooses, and may raise ValueError; None: it is no
    candidate. ``profile_digest``: of the loaded profile, None without one. ``quality_budget``: relative loss per token.
    ``clock``: as in :class:`policies.learned.LearnedPolicy`.
    """

    folders: tuple[Path, ...]
    rules: Policy
    predictor: Maker | None
    profile_digest: str | None
    quality_budget: float
    clock: Clock | None = None

    def learned(self, place: Path) -> Policy:
        """The bundled policy of a folder. Raises PolicyFileError."""
        advisor = advisors(None if self.profile_digest is None else self.predictor)
        return load_learned(
            place, fallback=self.rules, advisor=advisor, clock=self.clock, profile_digest=self.profile_digest
        )


@dataclass
class _Bundled:
    """Folders and their cards by the card's name and weights, and what is to be said of all others."""

    places: dict[tuple[str, str], tuple[Path, Card]] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)

    def of(self, one: Judged) -> tuple[Path, Card] | None:
        return self.places.get((one.name, one.sha256 or ""))


def by_verdict(verdict: ProfileVerdict, shelf: Shelf, refused: Iterable[Refused]) -> AutoPolicy:
    """Never raises for what cannot be used. ``refused``: what was refused before, told with the rest."""
    bundled = _bundled(verdict, shelf)
    told = [*refused, *bundled.refused, *_unjudged(verdict, shelf)]
    taken: tuple[Judged, Policy, str | None] | None = None
    for one in verdict.ranked():
        place = bundled.of(one)
        why_not = _objection(one, place, shelf)
        if why_not is None and taken is not None:
            why_not = "second", _beaten(one, taken[0])
        if why_not is None:
            made = _make(one, place, shelf)
            if not isinstance(made, tuple):
                taken = one, made, None if place is None else place[0].name
                continue
            why_not = made
        label = one.kind if one.kind != LEARNED else one.name if place is None else place[0].name
        told.append(Refused(label, *why_not))
    if taken is None:
        # They are taken all the same: what kept them from being chosen is in the line of the choice.
        own = next((one.why for one in told if one.name == RULES), "")
        why = f"none of {len(verdict.candidates)} policies judged on this profile can be used here"
        others = tuple(one for one in told if one.name != RULES)
        return AutoPolicy(shelf.rules, Choice(shelf.rules.name, None, why + (own and f"; rules: {own}"), others, RULES))
    one, policy, folder = taken
    return AutoPolicy(policy, Choice(policy.name, folder, _why(verdict, one, policy, shelf), tuple(told), one.kind))


def _bundled(verdict: ProfileVerdict, shelf: Shelf) -> _Bundled:
    found = _Bundled()
    judged = {(one.name, one.sha256) for one in verdict.candidates if one.kind == LEARNED}
    for place in shelf.folders:
        try:
            check_name(place)
            card = read_card(place)
        except PolicyFileError as error:
            found.refused.append(Refused(place.name, "unreadable", str(error)))
            continue
        own = card.name, card.sha256
        if own in found.places:
            why_not: _WhyNot = "second", f"it is the same as {found.places[own][0].name}"
        elif own in judged:
            found.places[own] = place, card
            continue
        else:
            why_not = _misfit(card, shelf) or _UNKNOWN
        found.refused.append(Refused(place.name, *why_not))
    return found


def _misfit(card: Card, shelf: Shelf) -> _WhyNot | None:
    """Why the policy of a card cannot be run here at all."""
    differs = card.objection()
    if differs is not None:
        return "mismatch", differs
    other = card.objection(shelf.profile_digest)
    return None if other is None else ("profile", other)


def _unjudged(verdict: ProfileVerdict, shelf: Shelf) -> list[Refused]:
    """Rules and predictor, where a verdict leaves them out."""
    judged = {one.kind for one in verdict.candidates}
    here = [RULES, *([PREDICTOR] if shelf.predictor is not None else [])]
    why = "the verdict on this profile has no figures of it"
    return [Refused(kind, "unjudged", why) for kind in here if kind not in judged]


def _objection(one: Judged, place: tuple[Path, Card] | None, shelf: Shelf) -> _WhyNot | None:
    """Why a judged policy is out of the question, whatever the others are."""
    if one.kind == LEARNED and place is None:
        weights = (one.sha256 or "")[:12]
        return "missing", f"it was judged with weights {weights}, and no bundled policy has its name and those"
    if one.kind == PREDICTOR and shelf.predictor is None:
        return "unbuildable", "nobody can make one here"
    why_not = None if place is None else _misfit(place[1], shelf)
    if why_not is None and one.worst_loss > shelf.quality_budget:
        lost = f"it lost {one.worst_loss:.2%} per token at worst"
        why_not = "over-budget", f"{lost}, the budget is {shelf.quality_budget:.2%}"
    return why_not


def _make(one: Judged, place: tuple[Path, Card] | None, shelf: Shelf) -> Policy | _WhyNot:
    try:
        if place is not None:
            return shelf.learned(place[0])
        return shelf.predictor() if one.kind == PREDICTOR and shelf.predictor is not None else shelf.rules
    except PolicyFileError as error:
        return "unreadable", str(error)
    except ValueError as error:
        return "unbuildable", short_line(error)


def _beaten(one: Judged, by: Judged) -> str:
    same = round(one.iqm.value, 3) == round(by.iqm.value, 3)
    told = ", and that one is simpler" if same and one.kind != by.kind else ""
    return f"it had {one.iqm} of requests inside their targets, {by.name} {by.iqm}{told}"


def _why(verdict: ProfileVerdict, one: Judged, policy: Policy, shelf: Shelf) -> str:
    why = f"{one.iqm} of requests inside their targets, the best of those judged on this profile that can be used here"
    why += f" ({verdict.of()}, {short_line(verdict.created)[:10]}; native {verdict.native.value:.3f})"
    if policy is shelf.rules and not _are_judged(policy):
        why += f"; judged were the rules {JUDGED_RULES}, in whose place these are"
    return why


def _are_judged(rules: Policy) -> bool:
    """By content: a copy that was changed may still have its old name."""
    if not isinstance(rules, ThresholdPolicy):
        return False
    own, judged = (replace(one, description="") for one in (rules.rules, load_rules(JUDGED_RULES)))
    return own == judged
