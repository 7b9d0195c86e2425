"""What came of it in words: the first side against every other one, with what got worse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from autotune.demo.report import Arm
from autotune.demo.sides import Side
from autotune.replay.summary import Percentiles
from autotune.replay.view import seconds
from engine.tunables import TUNABLES

NO_DIFFERENCE: Final = 0.05
"""Relative: two replays of the same differ by as much."""


@dataclass(frozen=True)
class _Figures:
    """Means over the rounds of a side; None: not known."""

    goodput_rps: float
    ttft_p95_s: float | None
    tbt_p95_s: float | None
    output_tps: float
    lost: int
    lossy: tuple[str, ...]


def verdict(arms: Sequence[Arm], sides: Sequence[Side]) -> list[str]:
    """One sentence per other side."""
    rounds = len(arms) // len(sides)
    of = "" if rounds > 1 else " (one round; --pairs N tells chance from effect)"
    first = _figures([arm for arm in arms if arm.side == sides[0]])
    return [
        f"{_sentence(_name(sides[0]), first, _name(one), _figures([arm for arm in arms if arm.side == one]))}{of}"
        for one in sides[1:]
    ]


def _name(side: Side) -> str:
    return f"the daemon with {side.label}" if side.is_tuned else side.label


def _sentence(name: str, ours: _Figures, other: str, theirs: _Figures) -> str:
    parts = [_goodput(name, ours.goodput_rps, other, theirs.goodput_rps)]
    worse, lost = list(_worse(ours, theirs)), ours.goodput_rps < theirs.goodput_rps * (1 - NO_DIFFERENCE)
    ttft = f"TTFT p95 {seconds(ours.ttft_p95_s)} against {seconds(theirs.ttft_p95_s)}"
    if _is_larger(ours.ttft_p95_s, theirs.ttft_p95_s):
        worse.insert(0, ttft)
    elif ours.ttft_p95_s is not None and theirs.ttft_p95_s is not None:
        parts.append(ttft)
    parts.append(f"worse: {', '.join(worse)}" if worse else f"nothing {'else ' if lost else ''}got worse")
    return "; ".join(parts)


def _goodput(name: str, ours: float, other: str, theirs: float) -> str:
    figures = f"{ours:.2f} against {theirs:.2f} requests/s inside the targets"
    if not ours and not theirs:
        return f"neither {name} nor {other} kept any request inside the targets"
    if not theirs:
        return f"{name} kept {ours:.2f} requests/s inside the targets, {other} none"
    if not ours:
        return f"{name} lost: it kept no request inside the targets, {other} {theirs:.2f} requests/s"
    ratio = ours / theirs
    if abs(ratio - 1) <= NO_DIFFERENCE:
        return f"no difference: {name} had as much goodput as {other} ({figures})"
    if ratio < 1:
        return f"{name} lost: {ratio:.2f} times the goodput of {other} ({figures})"
    times = f"{ratio:.3g}" if ratio < 100 else f"{ratio:.0f}"
    return f"{name} had {times} times the goodput of {other} ({figures})"


def _worse(ours: _Figures, theirs: _Figures) -> Iterable[str]:
    """What is worse than it was by more than chance brings, but for goodput and TTFT, which are told apart."""
    if _is_larger(ours.tbt_p95_s, theirs.tbt_p95_s):
        yield f"TBT p95 {seconds(ours.tbt_p95_s)} against {seconds(theirs.tbt_p95_s)}"
    if ours.output_tps < theirs.output_tps * (1 - NO_DIFFERENCE):
        yield f"{ours.output_tps:.0f} output tokens/s against {theirs.output_tps:.0f}"
    if ours.lost > theirs.lost:
        yield f"{ours.lost} requests lost against {theirs.lost}"
    if more := [name for name in ours.lossy if name not in theirs.lossy]:
        yield f"part of the KV stored in {' and '.join(more)}, which is not exact"


def _is_larger(ours: float | None, theirs: float | None) -> bool:
    return ours is not None and theirs is not None and ours > theirs * (1 + NO_DIFFERENCE)


def _figures(arms: Sequence[Arm]) -> _Figures:
    used = {str(value) for arm in arms for value in arm.seen.used("kv_format")}
    return _Figures(
        fmean(arm.summary.goodput_rps for arm in arms),
        _mean_p95(arm.summary.ttft for arm in arms),
        _mean_p95(arm.summary.tbt for arm in arms),
        fmean(arm.summary.output_tokens_per_s for arm in arms),
        sum(arm.summary.offered - arm.summary.completed for arm in arms),
        tuple(name for name in map(str, TUNABLES["kv_format"].values) if name in used and name != "native"),
    )


def _mean_p95(values: Iterable[Percentiles | None]) -> float | None:
    known = [value.p95_s for value in values if value is not None]
    return fmean(known) if known else None
