"""The quality budget as money: every generated token earns the budget and pays the loss that it was generated at.

The budget is a mean over tokens, so a night without lossy KV pays for a peak with it. What was earned long ago does
not count for ever: earnings and payments fade with a time constant. Pure; the state is a plain dictionary of floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from envs.window import number

_FADE_S: Final = 3600.0


@dataclass(frozen=True)
class Purse:
    """``tokens`` generated so far and the ``loss`` paid for them, faded."""

    tokens: float = 0.0
    loss: float = 0.0

    @classmethod
    def of(cls, state: object) -> Purse:
        """From a state; an unusable one is an empty purse."""
        if not isinstance(state, Mapping):
            return cls()
        tokens, loss = number(state.get("tokens")), number(state.get("loss"))
        return cls(tokens, loss) if tokens is not None and loss is not None and min(tokens, loss) >= 0 else cls()

    def to_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "loss": self.loss}

    def after(self, tokens: float, loss_per_token: float, seconds: float) -> Purse:
        """The purse ``seconds`` later, when so many tokens were generated at a loss."""
        keep = math.exp(-max(0.0, seconds) / _FADE_S)
        return Purse(self.tokens * keep + tokens, self.loss * keep + tokens * loss_per_token)

    def affordable(self, budget: float, tokens_ahead: float) -> float:
        """Largest loss per token at which so many more tokens keep the mean inside the budget."""
        if tokens_ahead <= 0:
            return math.inf if self.loss <= budget * self.tokens else 0.0
        return max(0.0, budget + (budget * self.tokens - self.loss) / tokens_ahead)
