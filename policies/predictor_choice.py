"""Which of the settings in reach is wanted, and under which name: the predictor's judgement. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.signals import Targets
from policies.effects import KNOBS, Effects, Places
from policies.load import Load
from policies.usual_budget import USUAL_BUDGET

STEADY: Final = "steady"
URGENT: Final = frozenset({"targets-missed", "best-effort", "budget-spent"})
_SEQS: Final = KNOBS.index("max_num_seqs")
_READY: Final = 0.9  # of the targets, by prediction, is near enough to act at no cost
_BACKLOG: Final = 0.5  # weight of being able to serve all that arrives and waits, beside being in time
_NOTICEABLE: Final = 0.15  # a relative gain where all are far from the targets
_DRAIN_S: Final = 10.0  # in which what waits should have been served
SAME_LOSS: Final = 2e-4  # relative losses of quality nearer than this are the same


@dataclass(frozen=True)
class PredictorConfig:
    """How the predictor weighs and waits. Raises ValueError for a negative budget.

    ``quality_budget``: mean relative loss per token. ``act_after_s``: for how long a target must be missed by
    prediction before anything moves; ``release_after_s``: for how long a milder setting must have met them with
    ``spare`` to spare. ``settle_s``: how long a change is left to work; ``stay_s``: how long a knob that has moved
    stays, a format that becomes lossier apart. ``patience_s``: how long a change is asked for before it counts as
    refused, which it then does for ``refused_s``. ``gain``: by how much of all arrivals a change must raise what is
    inside the targets, by twice that more if it draws upon the budget; ``hold_s``: for how long a lossy setting must be
    affordable. ``peak_fade_s``, ``usual_s``: time constants in which a peak of arrivals is forgotten, and in
    which they become usual; ``peak_share``: of the usual rate, from where on it is a peak. ``learn_s``: time constant
    in which measured gaps correct the profile's step times (0: never), ``still_s``: how long knobs must have stayed.
    """

    quality_budget: float = USUAL_BUDGET
    act_after_s: float = 1.0
    release_after_s: float = 30.0
    settle_s: float = 5.0
    patience_s: float = 12.0
    refused_s: float = 60.0
    spare: float = 0.25
    gain: float = 0.05
    stay_s: float = 45.0
    hold_s: float = 20.0
    peak_fade_s: float = 120.0
    usual_s: float = 300.0
    peak_share: float = 1.3
    learn_s: float = 120.0
    still_s: float = 15.0

    def __post_init__(self) -> None:
        if not self.quality_budget >= 0:
            raise ValueError(f"a quality budget is a mean relative loss >= 0, got {self.quality_budget}")


@dataclass(frozen=True)
class Wish:
    """Where to go: a row of the situation. ``kind``: the scenario."""

    kind: str
    row: int


@dataclass(frozen=True)
class Situation:
    """``rows``: the setting in force (``now``, row 0) and those in reach; ``effects`` of each under ``load``;
    ``allowed``: which of them may be wanted at all (for row 0: may be kept). ``peak_rps``: of arrivals, of late;
    ``usual_rps``: their mean.
    """

    now: Sequence[int]
    rows: Places
    effects: Effects
    load: Load
    allowed: NDArray[np.bool_]
    peak_rps: float
    usual_rps: float


def choose(here: Situation, targets: Targets, config: PredictorConfig) -> Wish:
    """The cheapest setting that is predicted to meet the targets, else the one that does most; row 0 to stay."""
    effects, load, allowed = here.effects, here.load, here.allowed
    quality, peak_rps = effects.quality, here.peak_rps
    strain = np.maximum(effects.ttft_s / targets.ttft_s, effects.tbt_s / targets.tbt_s)
    # What the budget can bear for ever is free: it is taken before it is needed, up to the latest peak.
    free = allowed & (quality <= config.quality_budget)
    near, most_rps = strain <= _READY, effects.most_rps
    if allowed[0] and strain[0] <= 1 and most_rps[0] >= load.rate_rps:
        if quality[0] > SAME_LOSS:  # nothing is milder than no loss
            milder = _roomy(here, strain, config) & (quality < quality[0] - SAME_LOSS)
            if milder.any():
                return Wish("milder", _cheapest(milder, here))
        # The most that free settings can serve inside the targets, as far as the latest peak wants it.
        fine = free & near
        most = float((fine * most_rps).max())
        enough = fine & (most_rps >= min(peak_rps, most / (1 + 3 * config.gain)))
        # What is there meets the targets: whoever moves for peaks to come must serve more of them, and stay as far away
        # from the targets, or far enough.
        more = enough & (most_rps >= (1 + config.gain) * most_rps[0]) & (strain <= max(strain[0], 1 - config.spare))
        if enough[0] or not more.any():
            return Wish(STEADY, 0)
        return Wish("ahead", _cheapest(more, here))
    # Beyond goodput, what can be served counts: it works off the backlog.
    needed = load.rate_rps + load.waiting / _DRAIN_S
    score = effects.goodput_share + _BACKLOG * np.minimum(1.0, most_rps / max(needed, 1e-6))
    score = np.where(allowed, score, -1.0)
    # Settings that the budget can bear for ever are free; others are drawn upon if they bring clearly more.
    staying = max(0.0, float(score[0]))
    bound = staying + min(config.gain, _NOTICEABLE * staying + 1e-6)
    # Savings are for peaks: a need that lasts cannot be met from them, and would come and go with the purse.
    is_peak = load.rate_rps >= config.peak_share * here.usual_rps
    paid_bound = max(bound, float(np.where(free, score, -1.0).max()) + 2 * config.gain)
    worth = allowed & np.where(free, score >= bound, (score >= paid_bound) & is_peak)
    if not worth.any():
        if allowed[0] or not allowed.any():
            return Wish(STEADY, 0)
        worth = allowed
    ready = free & near & (most_rps >= max(peak_rps, load.rate_rps))
    for fitting in (
        worth & _roomy(here, strain, config),
        worth & ready,
        worth & (strain <= 1) & (most_rps >= load.rate_rps),
    ):
        if fitting.any():
            kind = "targets-missed" if allowed[0] else "budget-spent"
            return Wish(kind, _cheapest(fitting, here))
    best = float(score[worth].max())
    as_good = worth & (score >= best - config.gain / 2)
    return Wish("best-effort" if allowed[0] else "budget-spent", _cheapest(as_good, here))


def _roomy(here: Situation, strain: NDArray[np.float64], config: PredictorConfig) -> NDArray[np.bool_]:
    """Allowed settings with room to spare, for the latest peak as well."""
    copes = here.effects.most_rps >= here.peak_rps * (1 + config.spare)
    found: NDArray[np.bool_] = here.allowed & (strain <= 1 - config.spare) & copes
    return found


def _cheapest(among: NDArray[np.bool_], here: Situation) -> int:
    """Least quality loss, then fewest moves, then soonest converged, then most sequences at once (too few of them shut
    out a load that was misjudged), then most goodput.
    """
    chosen, effects = np.flatnonzero(among), here.effects
    rows = here.rows[chosen]
    moves = (rows != np.array(here.now)).sum(axis=1)
    quality, soon = np.round(effects.quality[chosen] / SAME_LOSS), np.round(effects.converge_s[chosen], 1)
    order = np.lexsort((-effects.goodput_share[chosen], -rows[:, _SEQS], soon, moves, quality))
    return int(chosen[order[0]])
