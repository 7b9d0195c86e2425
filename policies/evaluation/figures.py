"""What an evaluation says: the figures of the JSON line, with intervals, each null where its contender is absent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.evaluation.cost import cost, reduction
from policies.evaluation.experiment import ABLATED, Results
from policies.evaluation.oracle import ORACLE
from policies.evaluation.shift import Shift, shift
from policies.evaluation.statistics import (
    Interval,
    Places,
    improvement,
    interval,
    iqm_difference,
    iqm_interval,
    iqm_ratio,
    resampled,
    seed_draws,
)
from policies.evaluation.table import BEST_STATIC, NATIVE, RANDOM_SEARCH, Table
from policies.named import is_budgeted
from policies.split import Family

OBJECTIVES: Final = ("interactive", "batch")
DRAWS: Final = 2000
_FIXED: Final = (BEST_STATIC, RANDOM_SEARCH, ORACLE)


@dataclass(frozen=True)
class Terms:
    """How costs are counted: the level of attainment that is held equal, and a device's price per hour."""

    attainment: float = 0.9
    price_per_hour: float = 1.0


def headline(results: Results, policies: Sequence[str], terms: Terms) -> dict[str, Any]:
    """The keys of ``make bench-policies``. ``policies``: those named on the command line."""
    table, best = results.table, results.best_policy
    learned = _best_of(table, [name for name in policies if name.startswith("learned:")])
    rules = _best_of(table, [name for name in policies if _is_rules(name)])
    predictor = "predictor" if "predictor" in table.rows else None
    shifts = [] if best is None else shifts_of(table, best)
    roomy = [one for one in shifts if one.headroom.value >= 0.05]
    figures: dict[str, Any] = dict.fromkeys(
        ("goodput_ratio_pressure", "goodput_ratio_idle", "regret_pct_upper_steady", "cost_reduction_pct")
    )
    if best is not None:
        figures["goodput_ratio_pressure"] = _json(goodput_ratio(table, best, table.pressured))
        figures["goodput_ratio_idle"] = _json(goodput_ratio(table, best, table.relaxed))
        regret = regret_to_best_static(table, best, table.of_family(Family.STEADY))
        if regret is not None:
            figures["regret_pct_upper_steady"] = {"value": 100 * regret.high, "regret_pct": regret.times(100).to_json()}
        figures["cost_reduction_pct"] = _json(cost_reduction(results, best, terms), 100)
    return {
        **figures,
        "shift_headroom_pct": _json(_largest([one.headroom for one in shifts]), 100),
        "shift_gain_pct": _json(_mean([one.gain for one in roomy]), 100),
        "shift_workloads_with_headroom": len(roomy),
        "learned_minus_rules": _json(_minus(table, learned, rules)),
        "learned_minus_predictor": _json(_minus(table, learned, predictor)),
        "ablation": ablation(results),
        "best_policy": best,
        "best_policy_inside_budget": None if best is None else table.inside_budget(best),
        "decision_p99_ms": None if best is None else _decision_p99_ms(table, best),
    }


def goodput_ratio(table: Table, name: str, places: Sequence[int], objective: str = "interactive") -> Interval | None:
    """IQM of goodput over offered, against static native's, on some workloads."""
    if not places:
        return None
    values = table.objective(objective)
    return iqm_ratio(values(name, places), values(NATIVE, places), _draws(table, len(places)))


def regret_to_best_static(
    table: Table, name: str, places: Sequence[int], objective: str = "interactive"
) -> Interval | None:
    """Share of the best static's goodput that is missing, mean over workloads; negative where the policy is better."""
    if not places:
        return None
    values, draws = table.objective(objective), _draws(table, len(places))
    ours, best = values(name, places), table.best_static_values(objective, places)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float((1.0 - ours.mean(1) / best.mean(1)).mean())
        many = (1.0 - resampled(ours, draws).mean(2) / resampled(best, draws).mean(2)).mean(1)
    return interval(value, many)


def shifts_of(table: Table, name: str) -> list[Shift]:
    """On every workload that changes its kind or level."""
    return [shift(table, place, name, _draws(table, 1)) for place in table.of_family(Family.SHIFT)]


def cost_reduction(results: Results, name: str, terms: Terms) -> Interval | None:
    """Against static native, at equal attainment: mean over the workloads on which native attains the level at all."""
    if name not in results.ladders:
        return None
    native = results.ladders[NATIVE]
    seeds = next(iter(native.values())).attainment.shape[0]
    value, _ = reduction(results.ladders[name], native, terms.attainment, seed_draws(len(native), seeds, DRAWS // 4))
    return value


def ablation(results: Results) -> dict[str, Any]:
    """By knob: goodput (share of offered, pressured workloads) lost when it is frozen. A loss whose interval holds 0
    says that the knob gained nothing that can be told.
    """
    table, best = results.table, results.best_policy
    if best is None or not results.ablated:
        return {}
    places = table.pressured
    full, draws = table.attainment(best, places), _draws(table, len(places))
    found: dict[str, Any] = dict.fromkeys(ABLATED)  # null: not offered by this engine, or not asked for
    for knob, frozen in results.ablated.items():
        lost = iqm_difference(full, frozen, draws)
        found[knob] = {**lost.to_json(), "gains": bool(lost.low > 0)}
    return found


def losing(table: Table, name: str, against: NDArray[np.float64]) -> list[str]:
    """Workloads on which a policy is worse, the whole interval of the mean difference below 0."""
    draws, found = _draws(table, len(table.scenarios)), []
    difference = table.attainment(name) - against
    many = resampled(difference, draws).mean(2)
    for place, scenario in enumerate(table.scenarios):
        if np.quantile(many[:, place], 0.975) < 0:
            found.append(scenario.text)
    return found


def overall(table: Table, names: Sequence[str], objective: str) -> list[dict[str, Any]]:
    """A row per contender over all workloads."""
    values, draws = table.objective(objective), _draws(table, len(table.scenarios))
    best = table.best_static_values(objective)
    rows = []
    for name in names:
        ours = best if name == BEST_STATIC else values(name, None)
        regret = (
            None if name == BEST_STATIC else regret_to_best_static(table, name, range(len(table.scenarios)), objective)
        )
        rows.append(
            {
                "contender": name,
                "iqm": iqm_interval(ours, draws).to_json(),
                "ratio_to_native": iqm_ratio(ours, values(NATIVE, None), draws).to_json(),
                "better_than_native": improvement(ours, values(NATIVE, None), draws).to_json(),
                "better_than_best_static": improvement(ours, best, draws).to_json(),
                "regret_pct": None if regret is None else regret.times(100).to_json(),
                "inside_budget": name == BEST_STATIC or table.inside_budget(name),
                # What never changes has nobody to hold it; only the others can be run without.
                "held_to_budget": name in table.statics or name in _FIXED or is_budgeted(name),
                "loses_to_native": [] if name == BEST_STATIC else losing(table, name, table.attainment(NATIVE)),
            }
        )
    return rows


def by_workload(table: Table, names: Sequence[str], duration_s: float) -> list[dict[str, Any]]:
    """A row per workload and contender: means over seeds, quality weighted by tokens, the median of tails."""
    rows = []
    for place, scenario in enumerate(table.scenarios):
        for name in names:
            used = table.best_static(place) if name == BEST_STATIC else name
            scores = table.rows[used][place]
            rows.append(
                {
                    "workload": scenario.text,
                    "pressured": place in table.pressured,
                    "contender": name,
                    "setting": used,
                    "goodput_rps": float(np.mean([s.goodput_rps for s in scores])),
                    "attainment": float(np.mean([s.attainment for s in scores])),
                    "ttft_p95_s": _median([s.ttft_p95_s for s in scores]),
                    "tbt_p95_s": _median([s.tbt_p95_s for s in scores]),
                    "quality_loss": table.quality(used, place),
                    "inside_budget": table.quality(used, place) <= table.quality_budget,
                    "tokens_per_s": float(np.mean([s.window_tokens for s in scores])) / duration_s,
                    "changes_per_hour": float(np.mean([s.changes for s in scores])) * 3600 / duration_s,
                    "preemptions": float(np.mean([s.preemptions for s in scores])),
                    "refused": float(np.mean([s.refused for s in scores])),
                }
            )
    return rows


def costs(results: Results, terms: Terms) -> list[dict[str, Any]]:
    """A row per workload and contender: the rate that it can take, and what a million tokens then cost."""
    rows = []
    for name, ladders in results.ladders.items():
        for workload, ladder in ladders.items():
            found = cost(ladder, terms.attainment, terms.price_per_hour)
            rows.append({"contender": name, "workload": workload, **vars(found)})
    return rows


def verdict(results: Results, policies: Sequence[str]) -> str:
    """One sentence."""
    table, best = results.table, results.best_policy
    if best is None:
        return "No policy was compared: the statics stand for themselves."
    ratio, idle = (goodput_ratio(table, best, places) for places in (table.pressured, table.relaxed))
    parts = [f"{best} is the best of {len(policies)} policies"]
    if ratio is None:
        parts.append("no workload was short of memory, so there was nothing to gain")
    else:
        parts.append(f"{ratio} times static native's goodput where memory is short")
    if idle is not None:
        parts.append(f"{idle} times elsewhere")
    worse = losing(table, best, table.best_static_values())
    parts.append(f"worse than the best static on {', '.join(worse)}" if worse else "nowhere worse than the best static")
    over = [s.text for place, s in enumerate(table.scenarios) if table.quality(best, place) > table.quality_budget]
    if over:
        parts.append(f"but OUTSIDE the quality budget of {table.quality_budget:.1%} on {', '.join(over)}")
    return ", ".join(parts) + "."


def _is_rules(name: str) -> bool:
    # What auto takes may be anything.
    return name not in {NATIVE, "predictor", "auto"} and not name.startswith(("static:", "learned:"))


def _best_of(table: Table, names: Sequence[str]) -> str | None:
    """Of those inside the quality budget everywhere, or of all if none is."""
    inside = [name for name in names if table.inside_budget(name)] or names
    return max(inside, key=lambda name: float(table.attainment(name).mean()), default=None)


def _minus(table: Table, one: str | None, other: str | None) -> Interval | None:
    if one is None or other is None:
        return None
    return iqm_difference(table.attainment(one), table.attainment(other), _draws(table, len(table.scenarios)))


def _draws(table: Table, workloads: int) -> Places:
    return seed_draws(workloads, len(table.rows[NATIVE][0]), DRAWS)


def _decision_p99_ms(table: Table, name: str) -> float | None:
    """The median over cells of the 99th percentile: a busy machine does not decide it."""
    return _median([score.decision_p99_ms for row in table.rows[name] for score in row])


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _largest(values: Sequence[Interval]) -> Interval | None:
    return max(values, key=lambda one: one.value, default=None)


def _mean(values: Sequence[Interval]) -> Interval | None:
    """Of intervals whose estimates are independent: half-widths add in squares."""
    if not values:
        return None
    middle = float(np.mean([one.value for one in values]))
    down, up = (
        float(np.sqrt(np.sum(np.square([getattr(one, side) - one.value for one in values])))) / len(values)
        for side in ("low", "high")
    )
    return Interval(middle, middle - down, middle + up)


def _json(value: Interval | None, factor: float = 1.0) -> dict[str, float | None] | None:
    return None if value is None else value.times(factor).to_json()
