"""Of an evaluation what ``auto`` goes by: a verdict on everybody who may be taken, in the evaluation's own figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from envs import SIMULATED_ENGINE_ID
from policies.advisor import PREDICTOR
from policies.card import ProfileOf, read_card
from policies.evaluation.cells import Setup
from policies.evaluation.experiment import Plan, Results
from policies.evaluation.scenarios import Scenario
from policies.evaluation.table import BEST_STATIC, NATIVE, Table
from policies.profile_verdict import (
    JUDGED_RULES,
    LEARNED,
    MOST_CANDIDATES,
    RULES,
    Attained,
    Judged,
    Kind,
    ProfileVerdict,
)

_LEARNED: Final = f"{LEARNED}:"


def judged(
    setup: Setup, plan: Plan, results: Results, overall: Sequence[Mapping[str, Any]], *, created: str, program: str
) -> ProfileVerdict | None:
    """None where nobody was played who may be taken: ``auto`` itself, statics, and rules other than the default are no
    candidates, nor is what the guard did not hold to the budget.

    ``overall``: the rows of :func:`policies.evaluation.figures.overall`. ``created``: UTC, ISO 8601. Raises
    PolicyFileError for a learned policy whose card is gone.
    """
    rows = {row["contender"]: Attained.model_validate(row["iqm"]) for row in overall}
    found: dict[tuple[str, str, str], Judged] = {}
    for name in plan.policies:
        who = _who(name)
        if who is not None:
            one = _candidate(results.table, name, who, rows[name])
            found.setdefault(one.identity, one)  # the same policy may be there by two paths
    if not found:
        return None
    profile = setup.profile
    return ProfileVerdict(
        created=created,
        program=program,
        environment=SIMULATED_ENGINE_ID,
        profile=ProfileOf(digest=profile.digest, description=profile.describe(), estimated=profile.is_estimated),
        quality_budget=plan.quality_budget,
        workloads=[_told(one) for one in plan.scenarios],
        seeds=plan.seeds,
        duration_s=float(setup.span.duration_s),
        interval_s=float(setup.interval_s),
        length_scale=float(setup.span.length_scale),
        pool_bytes=setup.pool_bytes,
        # Where there are too many, rules and predictor stay.
        candidates=sorted(found.values(), key=lambda one: one.kind == LEARNED)[:MOST_CANDIDATES],
        native=rows[NATIVE],
        best_static=rows[BEST_STATIC],
    )


def _who(name: str) -> tuple[Kind, str, str | None] | None:
    """Kind, name and weights of a contender that is a candidate."""
    if name == JUDGED_RULES:
        return RULES, name, None
    if name == PREDICTOR:
        return PREDICTOR, name, None
    if name.startswith(_LEARNED):
        card = read_card(Path(name.removeprefix(_LEARNED)))  # its weights are this card's, or they had not been played
        return LEARNED, card.name, card.sha256
    return None


def _candidate(table: Table, name: str, who: tuple[Kind, str, str | None], iqm: Attained) -> Judged:
    kind, told, sha256 = who
    return Judged(
        kind=kind,
        name=told,
        sha256=sha256,
        iqm=iqm,
        worst_loss=max(table.quality(name, place) for place in range(len(table.scenarios))),
        inside_budget=table.inside_budget(name),
    )


def _told(scenario: Scenario) -> str:
    """A trace by its name alone: where it lay is nobody's business."""
    return (
        scenario.text
        if scenario.is_generated
        else scenario.text.replace(scenario.source, Path(scenario.source).name, 1)
    )
