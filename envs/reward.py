"""What a control interval was worth: requests inside all targets, minus what they cost. Stdlib only.

Everything is a rate, so the length of the interval does not matter, except the price of a change, which is paid once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.tunables import TUNABLES, CostClass
from envs.port import Change
from envs.signals import FORMAT_NAMES, Targets, attainment
from envs.window import StatsWindow, amount, ratio
from kernels.layout import FORMATS


class Objective(StrEnum):
    """What the service is for: latency of people waiting, or work done."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True)
class QualityTable:
    """Relative increase of perplexity when all KV that a token attends is stored in a format, or all of it evicted.

    Mixed storage is charged in proportion. ``evicted_by``: by the way of evicting (a value of the tunable ``eviction``)
    where known; ``evicted`` for any other. Measured per model; :func:`literature_quality` until it has been.
    """

    by_format: Mapping[str, float]
    evicted: float
    evicted_by: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [name for name in FORMAT_NAMES if name not in self.by_format]
        if missing or min(*self.by_format.values(), self.evicted, *self.evicted_by.values()) < 0:
            raise ValueError(
                f"a loss >= 0 is needed for every format ({', '.join(FORMAT_NAMES)}), got {self.by_format}"
            )

    def loss_evicted(self, eviction: object) -> float:
        """Loss when all is evicted in this way; the usual one for a way that is unknown, or switched off by now."""
        return self.evicted_by.get(eviction, self.evicted) if isinstance(eviction, str) else self.evicted


def literature_quality() -> QualityTable:
    """Published figures for formats like ours (vLLM's turboquant k8v4 and 4 bit, KIVI) and guesses for eviction: what
    is chosen by attention is worth a quarter of what is merely old (H2O, SnapKV: little is lost at a fifth of the KV).
    """
    by_format = {kv_format.name: kv_format.expected_loss for kv_format in FORMATS}
    return QualityTable(by_format, evicted=0.2, evicted_by={"window": 0.2, "heavy_hitter": 0.05})


@dataclass(frozen=True)
class RewardWeights:
    """Prices, in requests per second.

    ``throughput``: worth of one token per second under ``batch``. ``violation``: of one request per second outside its
    targets, refused or failed. ``quality``: of one token per second generated at a relative loss of 1 (0.3 makes
    100 tokens/s at 2.7 % cost 0.8). ``switching``: once per change, by cost class.
    """

    objective: Objective = Objective.INTERACTIVE
    goodput: float = 1.0
    throughput: float = 0.01
    violation: float = 0.5
    quality: float = 0.3
    switching: Mapping[CostClass, float] = field(
        default_factory=lambda: {CostClass.STEP: 0.01, CostClass.BACKGROUND: 0.05, CostClass.RESTART: 1.0}
    )


@dataclass(frozen=True)
class RewardTerms:
    """The reward taken apart: ``gain`` less three costs. ``known`` is False when the window told nothing."""

    gain: float = 0.0
    violation: float = 0.0
    quality: float = 0.0
    switching: float = 0.0
    known: bool = False

    @property
    def total(self) -> float:
        return self.gain - self.violation - self.quality - self.switching


def loss_per_token(window: StatsWindow, quality: QualityTable) -> float | None:
    """Relative loss of a token generated at the end of a window, from what is resident and what was evicted."""
    tokens = _resident(window)
    if tokens is None:
        return None
    evicted = window.gauge("evicted_running_tokens") or 0.0
    held = sum(tokens.values())
    if held + evicted == 0:
        return 0.0
    lost = evicted * _loss_evicted(window, quality)
    charged = sum(count * quality.by_format[name] for name, count in tokens.items()) + lost
    return ratio(charged, held + evicted)


def _resident(window: StatsWindow) -> dict[str, float] | None:
    """Resident tokens by format; None where the reading does not tell."""
    if window.after is None or not isinstance(window.after.gauges.resident, list):
        return None
    tokens = dict.fromkeys(FORMAT_NAMES, 0.0)
    for row in window.after.gauges.resident:
        count = amount(row.tokens)
        if count is None or row.kv_format not in tokens:
            return None
        tokens[row.kv_format] += count
    return tokens


def _loss_evicted(window: StatsWindow, quality: QualityTable) -> float:
    in_force = None if window.after is None else window.after.effective
    return quality.loss_evicted(in_force.get("eviction") if isinstance(in_force, Mapping) else None)


@dataclass(frozen=True)
class Charge:
    """What was generated since the last look, and the relative loss per token that it is generated at now; None where
    the readings do not tell.
    """

    tokens: float | None = None
    loss: float | None = None


def charge_of(window: StatsWindow, quality: QualityTable) -> Charge:
    """The charge of an interval. What is resident at its end stands for all of it.

    Other than in :func:`loss_per_token`, which the reward goes by, what was evicted is held against what running
    requests have computed: prefixes that nobody reads, and one that many share, would make its share look small.
    """
    tokens, loss = _resident(window), loss_per_token(window, quality)
    evicted, seen = window.gauge("evicted_running_tokens"), window.gauge("resident_tokens")
    if tokens is not None and evicted and seen:
        stored = ratio(sum(count * quality.by_format[name] for name, count in tokens.items()), sum(tokens.values()))
        dropped = min(1.0, evicted / seen)
        loss = (1 - dropped) * (stored or 0.0) + dropped * _loss_evicted(window, quality)
    return Charge(window.count("generation_tokens"), loss)


def reward_terms(
    window: StatsWindow,
    targets: Targets,
    quality: QualityTable,
    weights: RewardWeights,
    applied: Change | None = None,
) -> RewardTerms:
    """Terms for one interval; always finite. Unknown windows earn and cost nothing but the switch itself."""
    switching = weights.switching[TUNABLES[applied.knob].cost_class] if applied and applied.knob in TUNABLES else 0.0
    done, tokens = window.rate("requests_completed"), window.rate("generation_tokens")
    bad = [window.rate(name) for name in ("requests_rejected", "requests_failed")]
    if done is None or tokens is None or bad[0] is None or bad[1] is None:
        return RewardTerms(switching=switching)
    inside = attainment(window, targets)
    good = done * inside if inside is not None else 0.0
    late = done - good if inside is not None else 0.0  # without first tokens in the window, lateness is unknown
    if weights.objective is Objective.BATCH:
        prefill = window.rate("prompt_tokens") or 0.0
        gain = weights.throughput * (tokens + prefill)
        violation = weights.violation * (bad[0] + bad[1])
    else:
        gain = weights.goodput * good
        violation = weights.violation * (late + bad[0] + bad[1])
    loss = loss_per_token(window, quality)
    return RewardTerms(gain, violation, weights.quality * tokens * (loss or 0.0), switching, known=True)
