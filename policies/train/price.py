"""The price of quality while a run learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from policies.train.judge import loss_per_token
from policies.train.recipe import Recipe


def next_price(price: float, outcomes: Sequence[dict[str, Any]], recipe: Recipe) -> float:
    """Dual ascent on the budget: dearer while training loses more than that, cheaper while it loses less.

    Episodes that began with other knobs than the defaults lose what nobody decided, so they do not count.
    """
    begun_plain = [outcome for outcome in outcomes if outcome["default_knobs"]]
    if not begun_plain:
        return price
    over = loss_per_token(begun_plain) / recipe.quality_budget - 1.0
    return max(0.0, price + recipe.price_step * float(np.clip(over, -1.0, 1.0)))
