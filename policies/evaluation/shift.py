"""What there is to gain from changing settings at all: the best static of every part against the best for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.evaluation.statistics import Interval, Places, interval
from policies.evaluation.table import Table

Floats = NDArray[np.float64]
_PRICES = np.concatenate(([0.0], np.geomspace(1e-3, 1e5, 49)))


@dataclass(frozen=True)
class Shift:
    """Of one workload, relative to the best single static: ``headroom`` of each segment's best, ``gain`` a policy's."""

    headroom: Interval
    gain: Interval


def shift(table: Table, place: int, policy: str, draws: Places) -> Shift:
    """``draws``: [number, 1, seeds]. Both static choices keep the quality budget over the whole window.

    A static's segment begins with what its earlier segments left behind, so the headroom is what is to be seen from
    outside, not what a switch would have to pay. Requests count for the segment in which they end.
    """
    statics = list(table.statics)
    good, tokens, charge = (_segments(table, statics, place, field) for field in ("good", "tokens", "charge"))
    whole = np.arange(len(statics)), np.array([table.quality(name, place) <= table.quality_budget for name in statics])
    allowed = whole[0][whole[1]] if whole[1].any() else whole[0][:1]
    picks = _best_by_segment(good.mean(1), charge.mean(1), tokens.mean(1), table.quality_budget)
    own = _segments(table, [policy], place, "good")[0].sum(-1)  # [seeds]

    # A seed drawn twice counts twice: means over draws of sums over segments.
    single = good[allowed].sum(-1)  # [allowed, seeds]
    mixed = sum((good[pick, :, part] for part, pick in enumerate(picks)), np.zeros(good.shape[1]))
    rows = draws[:, 0, :]
    best = single[:, rows].mean(-1).max(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        base = single.mean(-1).max()
        # Choosing the same static everywhere is one of the choices: less than no headroom is none.
        headroom = interval(max(0.0, mixed.mean() / base - 1.0), np.maximum(mixed[rows].mean(-1) / best - 1.0, 0.0))
        gain = interval(own.mean() / base - 1.0, own[rows].mean(-1) / best - 1.0)
    return Shift(headroom, gain)


def _segments(table: Table, names: Sequence[str], place: int, field: str) -> Floats:
    """[names, seeds, segments]."""
    return np.array(
        [[[getattr(part, field) for part in score.segments] for score in table.rows[name][place]] for name in names],
        np.float64,
    )


def _best_by_segment(good: Floats, charge: Floats, tokens: Floats, budget: float) -> list[int]:
    """A static for each segment, [statics, segments] each: most good requests with the whole inside the budget.

    By the price of loss: the lowest one at which the choice keeps the budget. Ties go to the first, the mildest.
    """
    over = charge - budget * tokens
    for price in _PRICES:
        picks = np.argmax(good - price * over, axis=0)
        if over[picks, np.arange(good.shape[1])].sum() <= 1e-12:
            return [int(pick) for pick in picks]
    return [0] * good.shape[1]
