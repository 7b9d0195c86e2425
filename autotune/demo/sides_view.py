"""How sides compare over all rounds: by name, beside what the simulator foretold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table

from autotune.demo.foretell import Foretold
from autotune.demo.sides import NATIVE, Side
from envs.fidelity import kendall_tau

LEAST_DIFFERENCE: Final = 0.1

if TYPE_CHECKING:
    from autotune.demo.report import Arm


def side_figures(arms: Sequence[Arm], sides: Sequence[Side], foretold: Mapping[str, Foretold]) -> dict[str, Any]:
    """By side: figures of every round, and ``ratio``, of its goodput to native's of the same round (to the last side's,
    if native is none of them), the median of the rounds; with several of them ``ratio_range`` as well, the least and
    the most. A ratio to nothing is left out.
    """
    reference = next((one for one in sides if one.name == NATIVE), sides[-1])
    base = [arm.summary.goodput_rps for arm in arms if arm.side == reference]
    found: dict[str, Any] = {}
    for one in sides:
        mine = [arm for arm in arms if arm.side == one]
        ratios = [arm.summary.goodput_rps / rps for arm, rps in zip(mine, base, strict=True) if rps > 0]
        found[one.name] = {
            "inside": [rounded(arm.inside) for arm in mine],
            "goodput_rps": [rounded(arm.summary.goodput_rps) for arm in mine],
            "ttft_p95_s": [None if arm.summary.ttft is None else rounded(arm.summary.ttft.p95_s) for arm in mine],
            "tbt_p95_s": [None if arm.summary.tbt is None else rounded(arm.summary.tbt.p95_s) for arm in mine],
            "lost": sum(arm.summary.offered - arm.summary.completed for arm in mine),
            "decisions_applied": sum(len(arm.seen.applied) for arm in mine),
            "preemptions": sum(arm.seen.preemptions for arm in mine),
            "evicted_tokens": sum(arm.seen.evicted_tokens for arm in mine),
            "ratio_to": reference.name,
            "ratio": rounded(median(ratios)) if ratios else None,
            # Of one round it would look like an interval, and be none.
            **({"ratio_range": [rounded(min(ratios)), rounded(max(ratios))]} if len(ratios) > 1 else {}),
            **({"foretold_inside": [rounded(x) for x in foretold[one.name].inside]} if one.name in foretold else {}),
        }
    return found


def order_agreement(
    arms: Sequence[Arm], sides: Sequence[Side], foretold: Mapping[str, Foretold]
) -> dict[str, float | int | None]:
    """Kendall's tau between mean shares inside the targets as seen and as foretold, over the pairs of sides that differ
    by more than a tenth in what was seen, and how many those are.
    """
    seen = [fmean(arm.inside for arm in arms if arm.side == one) for one in sides]
    tau, pairs = kendall_tau(seen, [fmean(foretold[one.name].inside) for one in sides], [LEAST_DIFFERENCE] * len(sides))
    return {"tau": tau, "pairs": pairs}


def sides_table(figures: Mapping[str, Any]) -> Table:
    """One row per side of :func:`side_figures`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    reference = next(iter(figures.values()))["ratio_to"]
    against = "native" if reference == NATIVE else reference
    several = any("ratio_range" in row for row in figures.values())
    over = f"goodput over {against}'s" + (" (least to most)" if several else "")
    for title in ("inside the targets", over, "lost", "changes", "foretold"):
        table.add_column(title, justify="right")
    for name, row in figures.items():
        told = row.get("foretold_inside")
        table.add_row(
            "static native" if name == NATIVE else name,
            f"{fmean(row['inside']):.0%}",
            _ratio(row),
            str(row["lost"]),
            str(row["decisions_applied"]),
            "-" if told is None else f"{fmean(told):.0%}",
        )
    return table


def _ratio(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return "-"
    least, most = row.get("ratio_range", (None, None))
    return f"{row['ratio']:.2f}" + ("" if least is None else f" ({least:.2f} to {most:.2f})")


def rounded(value: float) -> float:
    """Four digits, as in the result's JSON."""
    return float(f"{value:.4g}")
