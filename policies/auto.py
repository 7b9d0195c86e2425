"""``auto``: the best policy that comes with the program for what is loaded, by what was measured; and why.

First counts a *verdict* of an evaluation on the loaded profile (:mod:`policies.profile_verdict`), which compares rules,
predictor and learned policies on held-out workloads: of those that it judged inside the quality budget the best that
can be used here is taken (:mod:`policies.by_verdict`).

Without one, a bundled learned policy may be taken by its own card, else the rules are. Such a policy is a folder with a
card and weights (:mod:`policies.card`), found by its card, and read without running code of it. It fits if this program
can run it, if it was trained on the loaded profile, and if by its own card's held-out scores it keeps the quality
budget and earns more than the rules did on the same episodes. Of those that fit, the one with the largest such gain is
taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from engine.clock import Clock
from policies.advisor import PREDICTOR
from policies.base import Policy
from policies.by_verdict import Maker, Shelf, by_verdict
from policies.card import CARD_FILE, Card, PolicyFileError, check_name, read_card
from policies.choice import AutoPolicy, Choice, Refused
from policies.profile_verdict import (
    LEARNED,
    RULES,
    VERDICTS,
    ProfileVerdict,
    objection,
    read_verdict,
    verdict_files,
)

BUNDLED: Final = Path(__file__).parent / "bundled"
MOST_BUNDLED: Final = 32  # more are not looked at: their names label a metric
_OWN: Final = "learned"  # under this name a card has its policy's own scores


def choose(
    folder: Path,
    rules: Policy,
    *,
    profile_digest: str | None,
    quality_budget: float,
    clock: Clock | None = None,
    predictor: Maker | None = None,
) -> AutoPolicy:
    """Never raises for what is in ``folder``: what cannot be used is refused, and the rules are always there.

    Arguments as in :class:`policies.by_verdict.Shelf`; without a profile nothing fits but the rules.
    """
    shelf = Shelf(_folders(folder), rules, predictor, profile_digest, quality_budget, clock)
    verdict, refused = _verdict(folder / VERDICTS, profile_digest)
    if verdict is not None:
        return by_verdict(verdict, shelf, refused)
    if predictor is not None:
        refused.append(_without_verdict(profile_digest))
    return _by_card(shelf, refused)


def _verdict(folder: Path, profile_digest: str | None) -> tuple[ProfileVerdict | None, list[Refused]]:
    """The one on the loaded profile, and what is to be said of files that cannot be used."""
    refused: list[Refused] = []
    found: list[tuple[Path, ProfileVerdict]] = []
    for file in verdict_files(folder):
        try:
            check_name(file)
            verdict = read_verdict(file)
        except PolicyFileError as error:
            refused.append(Refused(file.name, "unreadable", str(error)))
            continue
        if verdict.profile.digest != profile_digest:
            continue  # most are on other profiles: nothing is wrong with that
        differs = objection(verdict)
        if differs is None:
            found.append((file, verdict))
        else:
            refused.append(Refused(file.name, "mismatch", differs))
    if len(found) == 1:
        return found[0][1], refused
    names = ", ".join(file.name for file, _ in found)
    refused += [
        Refused(file.name, "ambiguous", f"there is more than one verdict on this profile: {names}") for file, _ in found
    ]
    return None, refused


def _without_verdict(profile_digest: str | None) -> Refused:
    if profile_digest is None:
        return Refused(PREDICTOR, "no-profile", "no profile is loaded, and it calculates with one")
    return Refused(PREDICTOR, "unjudged", f"there is no usable verdict on this profile ({profile_digest[:12]})")


def _by_card(shelf: Shelf, told: list[Refused]) -> AutoPolicy:
    refused = list(told)
    fitting: list[tuple[float, Path]] = []
    for place in shelf.folders:
        judged = _judge(place, shelf.profile_digest, shelf.quality_budget)
        if isinstance(judged, Refused):
            refused.append(judged)
        else:
            fitting.append((judged, place))
    fitting.sort(key=lambda one: -one[0])  # the first by name, where two gain the same
    for rank, (gain, place) in enumerate(fitting):
        try:
            policy = shelf.learned(place)
        except PolicyFileError as error:
            refused.append(Refused(place.name, "unreadable", str(error)))
            continue
        for less, other in fitting[rank + 1 :]:
            why = f"it gained {less:.3g} on the rules, {place.name} {gain:.3g}"
            refused.append(Refused(other.name, "second", why))
        why = f"trained for this profile, {gain:.3g} more reward than the rules on held-out episodes"
        return AutoPolicy(policy, Choice(policy.name, place.name, why, tuple(refused), LEARNED))
    number = len(shelf.folders)
    why = f"none of {number} bundled policies fits" if number else "no policy is bundled"
    return AutoPolicy(shelf.rules, Choice(shelf.rules.name, None, why, tuple(refused), RULES))


def _folders(folder: Path) -> tuple[Path, ...]:
    """Those with a card, by name; none where there is no such folder."""
    try:
        return tuple(sorted(card.parent for card in folder.glob(f"*/{CARD_FILE}"))[:MOST_BUNDLED])
    except OSError:
        return ()


def _judge(place: Path, profile_digest: str | None, quality_budget: float) -> Refused | float:
    """The card's gain on the rules in reward, or why it is out of the question."""
    name = place.name
    try:
        check_name(place)
        card = read_card(place)
    except PolicyFileError as error:
        return Refused(name, "unreadable", str(error))
    differs = card.objection()
    if differs is not None:
        return Refused(name, "mismatch", differs)
    if profile_digest is None:
        return Refused(name, "no-profile", "no profile is loaded, so that nothing says what it was trained for fits")
    other = card.objection(profile_digest)
    if other is not None:
        return Refused(name, "profile", other)
    gain, loss = _gain(card), _score(card, _OWN, "loss_per_token")
    if gain is None or loss is None:
        return Refused(name, "unscored", "its card has no held-out scores of its own and of rules to go by")
    if loss > quality_budget:
        return Refused(name, "over-budget", f"it lost {loss:.2%} per token, the budget is {quality_budget:.2%}")
    if gain <= 0:
        return Refused(name, "no-gain", f"by its card rules earn as much or more ({gain:+.3g} of reward)")
    return gain


def _gain(card: Card) -> float | None:
    """Mean reward beyond that of the rules over the same held-out episodes."""
    own = _score(card, _OWN, "reward")
    others = [
        score.mean for score in card.scores if score.figure == "reward" and score.policy.partition(":")[0] == "rules"
    ]
    return None if own is None or not others else own - max(others)


def _score(card: Card, policy: str, figure: str) -> float | None:
    return next((score.mean for score in card.scores if (score.policy, score.figure) == (policy, figure)), None)
