"""``auto``: the best policy that comes with the program and fits what is loaded, else the rules; and why.

A bundled policy is a folder with a card and weights (:mod:`policies.card`), found by its card, and read without running
code of it. It fits if this program can run it, if it was trained on the loaded profile, and if by its own card's
held-out scores it keeps the quality budget and earns more than the rules did on the same episodes. Of those that fit,
the one with the largest such gain is taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from engine.clock import Clock
from policies.base import Policy
from policies.card import CARD_FILE, Card, PolicyFileError, read_card
from policies.choice import AutoPolicy, Choice, Refused
from policies.learned import load_learned

BUNDLED: Final = Path(__file__).parent / "bundled"
MOST_BUNDLED: Final = 32  # more are not looked at: their names label a metric
_OWN: Final = "learned"  # under this name a card has its policy's own scores


def choose(
    folder: Path, rules: Policy, *, profile_digest: str | None, quality_budget: float, clock: Clock | None = None
) -> AutoPolicy:
    """Never raises for what is in ``folder``: what cannot be used is refused, and the rules are always there.

    ``rules``: taken when nothing fits, and the fallback of what is taken. ``profile_digest``: of the loaded profile,
    None without one; then nothing fits. ``quality_budget``: relative loss per token. ``clock``: as in
    :class:`policies.learned.LearnedPolicy`.
    """
    refused: list[Refused] = []
    fitting: list[tuple[float, Path]] = []
    found = _folders(folder)
    for place in found:
        judged = _judge(place, profile_digest, quality_budget)
        if isinstance(judged, Refused):
            refused.append(judged)
        else:
            fitting.append((judged, place))
    fitting.sort(key=lambda one: -one[0])  # the first by name, where two gain the same
    for rank, (gain, place) in enumerate(fitting):
        try:
            policy = load_learned(place, fallback=rules, clock=clock, profile_digest=profile_digest)
        except PolicyFileError as error:
            refused.append(Refused(place.name, "unreadable", str(error)))
            continue
        for less, other in fitting[rank + 1 :]:
            why = f"it gained {less:.3g} on the rules, {place.name} {gain:.3g}"
            refused.append(Refused(other.name, "second", why))
        why = f"trained for this profile, {gain:.3g} more reward than the rules on held-out episodes"
        return AutoPolicy(policy, Choice(policy.name, place.name, why, tuple(refused)))
    why = f"none of {len(found)} bundled policies fits" if found else "no policy is bundled"
    return AutoPolicy(rules, Choice(rules.name, None, why, tuple(refused)))


def _folders(folder: Path) -> list[Path]:
    """Those with a card, by name; none where there is no such folder."""
    try:
        return sorted(card.parent for card in folder.glob(f"*/{CARD_FILE}"))[:MOST_BUNDLED]
    except OSError:
        return []


def _judge(place: Path, profile_digest: str | None, quality_budget: float) -> Refused | float:
    """The card's gain on the rules in reward, or why it is out of the question."""
    name = place.name
    try:
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
