"""What advice would have been worth, played on a simulated engine: an estimate with a queue in it, where a profile is
given. The format of ours that is as lossy stands for the other engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any, Final

from autotune.adapters.watching import Seen
from engine.formats import NATIVE
from engine.memory_model import token_bytes
from engine.tunables import TunableValue, default_values
from envs.profile import Profile
from envs.signals import Targets
from policies.advice_score import Moment, Score, drawn, score
from policies.restart_advice import Advice, Storage

_DRAWS: Final = 3


def play(
    seen: Sequence[Seen],
    advice: Advice,
    storage: dict[str, Storage],
    effective: dict[str, TunableValue],
    profile: Profile,
    targets: Targets,
    capacity_tokens: int | None,
) -> dict[str, Any]:
    """Scores as it was and as advised, means over a few draws of arrivals like those that were seen.

    ``capacity_tokens``: what the watched engine's pool holds; the simulated one gets as much. Raises ValueError where
    arrivals or their lengths are not known.
    """
    change = advice.changes[0]
    now = {**default_values(), "kv_format": storage[str(effective[change.knob])].like}
    then = {**now, "kv_format": storage[str(change.value)].like}
    moments = [Moment(one.at_s, one.rate_rps, one.prompt, one.output, now, then) for one in seen]
    if capacity_tokens is not None:
        native = sum(token_bytes(group.shape, NATIVE) for group in profile.groups())
        profile = profile.model_copy(update={"pool_bytes": round(capacity_tokens * native)})
    was, advised = list[Score](), list[Score]()
    for seed in range(_DRAWS):
        trace = drawn(moments, profile.model.max_model_len, seed)
        was.append(score(moments, trace, profile, targets, advised=False))
        advised.append(score(moments, trace, profile, targets, advised=True))
    return {"draws": _DRAWS, "as_it_was": _means(was), "as_advised": _means(advised)}


def _means(scores: Sequence[Score]) -> dict[str, float]:
    return {name: mean(float(one.to_json()[name]) for one in scores) for name in scores[0].to_json()}
