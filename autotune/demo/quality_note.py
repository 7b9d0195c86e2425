"""Says by which figures the guard judges what formats cost, since nothing else in the output would."""

from __future__ import annotations

from envs.profile import Profile
from envs.reward import literature_quality
from policies.usual_budget import USUAL_BUDGET


def quality_note(profile: Profile | None, source: str) -> str:
    """One line. ``profile``: what the guard goes by, None for published figures of other models; ``source``: where that
    profile comes from.
    """
    table = None if profile is None else profile.quality_table()
    if table is None:
        table, source = literature_quality(), "published figures of other models (--profile FILE has this one's)"
    lossy = {name: loss for name, loss in table.by_format.items() if name != "native"}
    beyond = [name for name, loss in lossy.items() if loss > USUAL_BUDGET]
    told = ", ".join(f"{name} {loss:.2%}" for name, loss in lossy.items())
    judged = f"beyond it for long: {' and '.join(beyond)}" if beyond else "all of them inside it"
    return f"loss per token by {source}: {told}; the guard's budget is {USUAL_BUDGET:.1%}, {judged}"
