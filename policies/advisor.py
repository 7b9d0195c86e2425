"""The policies that an exported one may overrule, by the name on its card. Light: the predictor is made elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from policies.base import Policy
from policies.rules import load_rules, presets
from policies.threshold import ThresholdPolicy

Advisors = Callable[[str], Policy]
"""Makes the policy of a name. Raises ValueError, one line, for one that is not to be had."""
PREDICTOR: Final = "predictor"


def advisors(predictor: Callable[[], Policy] | None) -> Advisors:
    """Presets of rules, and the predictor if there is a profile to make it of. Files are not: a card names no paths."""

    def make(name: str) -> Policy:
        if name == PREDICTOR:
            if predictor is None:
                raise ValueError("it calculates with the engine's profile; name one")
            return predictor()
        if name not in presets():
            raise ValueError("no policy of this name comes with the program")
        return ThresholdPolicy(load_rules(name))

    return make
