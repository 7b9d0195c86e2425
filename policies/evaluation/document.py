"""Everything that an evaluation found, as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.evaluation.cells import Setup
from policies.evaluation.experiment import Plan, Results
from policies.evaluation.figures import OBJECTIVES, Terms, by_workload, costs, headline, overall, verdict
from policies.evaluation.oracle import ORACLE
from policies.evaluation.table import BEST_STATIC, NATIVE, RANDOM_SEARCH
from policies.named import is_budgeted
from policies.split import HELD_OUT


def document(setup: Setup, plan: Plan, results: Results, terms: Terms) -> dict[str, Any]:
    """JSON-able. ``headline`` holds the keys of the benchmark's last line."""
    table = results.table
    shown = [NATIVE, BEST_STATIC, *([RANDOM_SEARCH] if RANDOM_SEARCH in table.rows else []), *plan.policies]
    shown = list(dict.fromkeys(shown))
    found = headline(results, plan.policies, terms)
    return {
        "verdict": verdict(results, plan.policies),
        "headline": found,
        "best_policy": results.best_policy,
        "ablation": found["ablation"],
        "profile": setup.profile.describe(),
        "profile_digest": setup.profile.digest,
        "estimated": setup.profile.is_estimated,
        "seeds": plan.seeds,
        "duration_s": setup.span.duration_s,
        "length_scale": setup.span.length_scale,
        "interval_s": setup.interval_s,
        "quality_budget": plan.quality_budget,
        "calibrations": {name: one.to_json() for name, one in setup.calibrations.items()},
        "notes": _notes(setup, plan, results),
        "overall": {objective: overall(table, shown, objective) for objective in OBJECTIVES},
        "workloads": by_workload(table, shown, setup.span.duration_s),
        "statics": {
            objective: {one.text: table.best_static(place, objective) for place, one in enumerate(plan.scenarios)}
            for objective in OBJECTIVES
        },
        "random_search": dict(results.random_choice),
        "oracle": []
        if results.oracle is None
        else by_workload(results.oracle, [ORACLE, *shown], setup.span.duration_s),
        "costs": costs(results, terms),
        "cost_level": terms.attainment,
        "cost_method": f"A device costs {terms.price_per_hour:g} per hour whatever it does, so a token costs least at "
        f"the highest rate at which {terms.attainment:.0%} of requests stay inside their targets, read off a ladder of "
        "rates.",
        "ladders": _ladders(results),
    }


def _ladders(results: Results) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name, ladders in results.ladders.items():
        for workload, ladder in ladders.items():
            one = found.setdefault(workload, {"rates": list(ladder.rates), "attainment": {}})
            one["attainment"][name] = [float(value) for value in ladder.attainment.mean(0)]
    return found


def _notes(setup: Setup, plan: Plan, results: Results) -> Sequence[str]:
    table = results.table
    pressed = [table.scenarios[place].text for place in table.pressured]
    free = [name for name in plan.policies if name not in plan.static_names and not is_budgeted(name)]
    known = [one.text for one in plan.scenarios if one.is_generated and one.source not in HELD_OUT]
    notes = [
        setup.profile.describe(),
        f"{plan.seeds} seeds of {setup.span.duration_s:g} s, a decision every {setup.interval_s:g} s.",
        f"Static settings: {', '.join(plan.static_names)}.",
        f"Short of memory under static native: {', '.join(pressed) or 'none'}.",
        f"Quality budget: a token-weighted loss of {plan.quality_budget:.2%}.",
        *(
            f"{name}: targets {one.targets.ttft_s:.3g} s to the first token and {one.targets.tbt_s:.3g} s between "
            f"tokens; native serves {one.capacity_rps:.3g} requests/s of it."
            for name, one in setup.calibrations.items()
        ),
    ]
    if free:
        notes.append(f"Not held to the quality budget by the guard: {', '.join(free)}.")
    if setup.span.length_scale != 1:
        notes.append(f"Prompts and outputs were divided by {setup.span.length_scale:g}.")
    if known:
        notes.append(f"Not held out, policies may have been trained on these: {', '.join(known)}.")
    return notes
