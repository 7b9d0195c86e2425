"""Did a change do what was expected of it? One bounded rule, on the figures of the window before and of one after it.

A tail counts against a change only where all of this holds: it is over its target, it is worse than it was and worse
than was predicted, each by more than the tolerance, and the load is not to blame: arrivals have not grown by more than
a margin, nor has the KV that requests in hand would need, where memory is short (a queue that builds up anyway is
nobody's fault). With memory to spare more requests in hand are no load: a slower engine holds each for longer.

First tokens of requests that had come before a change tell nothing of it: while a queue of them drains, TTFT is no
reason to take it back (:func:`drains`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from envs.signals import Targets

TAILS: Final = ("ttft_tail_s", "tbt_tail_s")
LOADS: Final = ("offered_rps", "kv_demand")
FIGURES: Final = (*TAILS, *LOADS)
"""Observation features that a judgement needs."""
AMPLE: Final = 0.8  # of the pool: requests in hand would need less of it in native storage
WAITING: Final = "waiting"

Figures = Mapping[str, float | None]


class Outcome(StrEnum):
    """What became of a change."""

    MET = "met"  # no tail counts against it
    SHORT = "short"  # less than half of the predicted relief has come, and a target is still missed
    MISSED = "missed"  # a tail counts against it: it is rolled back
    UNCLEAR = "unclear"  # it cannot be told


@dataclass(frozen=True)
class JudgeConfig:
    """``tolerance``: relative, of tails. ``load_margin``: relative growth of the load beyond which it is to blame."""

    targets: Targets
    tolerance: float = 0.25
    load_margin: float = 0.3


def judge(before: Figures, predicted: Figures | None, after: Figures, config: JudgeConfig) -> tuple[Outcome, str]:
    """The outcome and why, in one line with the numbers. Unknown figures make it unclear, never a miss."""
    for name in LOADS:
        then, now = before.get(name), after.get(name)
        if name == "kv_demand" and now is not None and now < AMPLE:
            continue
        if then is not None and now is not None and now > then * (1 + config.load_margin) + 0.05:
            return Outcome.UNCLEAR, f"the load has grown meanwhile: {name} {then:.3g} -> {now:.3g}"
    limits = dict(zip(TAILS, (config.targets.ttft_s, config.targets.tbt_s), strict=True))
    known = [name for name in TAILS if before.get(name) is not None and after.get(name) is not None]
    if not known:
        return Outcome.UNCLEAR, "no latencies were measured before and after"
    told, short = [], ""
    for name in known:
        then, now, limit = float(before[name] or 0.0), float(after[name] or 0.0), limits[name]
        hoped = (predicted or {}).get(name)
        line = f"{name} {then:.3g} -> {now:.3g} s" + ("" if hoped is None else f", predicted {hoped:.3g}")
        told.append(line)
        worst_expected = then if hoped is None else max(then, hoped)
        if now > limit and now > worst_expected * (1 + config.tolerance):
            return Outcome.MISSED, f"{line}; the target is {limit:g} s"
        if (
            hoped is not None
            and now > limit
            and then - hoped > config.tolerance * then
            and then - now < (then - hoped) / 2
        ):
            short = line
    return (Outcome.SHORT, short) if short else (Outcome.MET, "; ".join(told))


def drains(before: Figures, after: Figures, since_s: float, window_s: float) -> bool:
    """Whether the TTFT tail that was read ``since_s`` after a change may be of requests that had come before it.

    A queue was there before the change and is shorter now, and the tail is longer than the time from the change to
    where the window begins: who came before the change and got a first token within the window has waited for at least
    that. A queue that grows is no reason: what takes longer and longer to admit requests would never be judged. Unknown
    figures are no reason either.
    """
    then, now, tail_s = before.get(WAITING), after.get(WAITING), after.get("ttft_tail_s")
    if then is None or now is None or tail_s is None:
        return False
    return now < then and tail_s > since_s - window_s


def without_first_tokens(after: Figures) -> Figures:
    """Figures that TTFT cannot be judged by."""
    return {**after, "ttft_tail_s": None}
