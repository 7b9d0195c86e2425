"""The cells of an evaluation, stage by stage: what is run later depends on what came out before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from policies.evaluation.cells import Cell
from policies.evaluation.cost import Ladder
from policies.evaluation.oracle import ORACLE
from policies.evaluation.scenarios import Scenario
from policies.evaluation.statics import Values
from policies.evaluation.statistics import iqm
from policies.evaluation.store import Store
from policies.evaluation.table import NATIVE, RANDOM_SEARCH, Table
from policies.executors import Executor
from policies.named import static_name
from policies.usual_budget import USUAL_BUDGET

# Knobs that are frozen together in an ablation.
ABLATED: Final[Mapping[str, tuple[str, ...]]] = {
    "kv_format": ("kv_format",),
    "block_size": ("block_size",),
    "eviction": ("eviction", "keep_tokens"),
    "host_offload": ("host_offload",),
    "max_num_batched_tokens": ("max_num_batched_tokens",),
    "max_num_seqs": ("max_num_seqs",),
}
_SEARCH_SEED: Final = 500_000  # what random search looks at is not what it is judged on


@dataclass(frozen=True)
class Plan:
    """What is compared. ``random``: settings tried by random search (0: none), on ``search_seeds`` seeds.

    ``oracle_seeds``, ``cost_seeds``: the first so many seeds; 0 leaves the part out. ``rates``: the ladder of
    :mod:`policies.evaluation.cost`, in increasing order with 1 in it. ``ablated``: keys of ABLATED.
    """

    scenarios: tuple[Scenario, ...]
    policies: tuple[str, ...]
    statics: tuple[Values, ...]
    seeds: int = 10
    random: tuple[Values, ...] = ()
    search_seeds: int = 2
    oracle_seeds: int = 0
    cost_seeds: int = 3
    rates: tuple[float, ...] = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
    ablated: tuple[str, ...] = tuple(ABLATED)
    quality_budget: float = USUAL_BUDGET

    def __post_init__(self) -> None:
        if self.seeds < 1 or not self.scenarios:
            raise ValueError("at least one seed and one workload are needed")
        if list(self.rates) != sorted(set(self.rates)) or min(self.rates) <= 0:
            raise ValueError("rates must be > 0 and increase")

    @property
    def static_names(self) -> tuple[str, ...]:
        """Native first, each once."""
        return tuple(dict.fromkeys([NATIVE, *map(static_name, self.statics)]))


class Progress(Protocol):
    """Told of every stage and every cell."""

    def stage(self, name: str, cells: int) -> None:
        """A stage begins, with so many cells still to run."""
        ...

    def done(self) -> None:
        """A cell is done."""
        ...


@dataclass(frozen=True)
class Results:
    """``oracle``: the same contenders over the oracle's seeds, with it among them. ``ablated``: by knob, attainment
    [pressured workloads, seeds] of the best policy with the knob frozen. ``ladders``: by contender and workload.
    """

    table: Table
    best_policy: str | None
    random_choice: Mapping[str, str]
    oracle: Table | None
    ablated: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]
    ladders: Mapping[str, Mapping[str, Ladder]]


def run(plan: Plan, store: Store, executor: Executor, progress: Progress) -> Results:
    """Run every stage. Raises what a cell raises."""
    stage = _Stage(store, executor, progress)
    names = tuple(dict.fromkeys([*plan.static_names, *plan.policies]))
    seeds = range(plan.seeds)
    stage("contenders", [Cell(one, seed, name) for one in plan.scenarios for seed in seeds for name in names])
    rows = {name: _rows(plan, store, [name] * len(plan.scenarios), plan.seeds) for name in names}

    choice = _random_search(plan, store, stage) if plan.random else {}
    if choice:
        picks = [choice[one.text] for one in plan.scenarios]
        pairs = zip(plan.scenarios, picks, strict=True)
        stage("random search, judged", [Cell(one, seed, pick) for one, pick in pairs for seed in seeds])
        rows[RANDOM_SEARCH] = _rows(plan, store, picks, plan.seeds)
    table = Table(plan.scenarios, rows, plan.static_names, plan.quality_budget)

    oracle = None
    if plan.oracle_seeds:
        few = range(min(plan.oracle_seeds, plan.seeds))
        stage("oracle", [Cell(one, seed, ORACLE) for one in plan.scenarios for seed in few])
        short = {name: [list(scores[: len(few)]) for scores in row] for name, row in rows.items()}
        short[ORACLE] = _rows(plan, store, [ORACLE] * len(plan.scenarios), len(few))
        oracle = Table(plan.scenarios, short, plan.static_names, plan.quality_budget)

    best = best_policy(table, plan.policies)
    ablated = {}
    if plan.ablated and best is not None:
        pressed = [plan.scenarios[place] for place in table.pressured]
        for knob in plan.ablated:
            frozen = ABLATED[knob]
            cells = [[Cell(one, seed, best, frozen) for seed in seeds] for one in pressed]
            stage(f"without {knob}", [cell for row in cells for cell in row])
            if cells:
                ablated[knob] = np.array([[store.get(cell).attainment for cell in row] for row in cells])

    ladders = {}
    if plan.cost_seeds:
        kept = _cost_contenders(table, plan.policies)
        few = range(min(plan.cost_seeds, plan.seeds))
        stage(
            "cost",
            [
                Cell(one, seed, name, rate=rate)
                for one in plan.scenarios
                for seed in few
                for name in kept
                for rate in plan.rates
            ],
        )
        ladders = {name: {one.text: _ladder(plan, store, one, name, few) for one in plan.scenarios} for name in kept}
    return Results(table, best, choice, oracle, ablated, ladders)


def best_policy(table: Table, policies: Sequence[str]) -> str | None:
    """The best IQM of attainment among policies inside the quality budget everywhere; among all if none is."""
    moving = [name for name in policies if name not in table.statics]
    allowed = [name for name in moving if table.inside_budget(name)] or moving
    return max(allowed, key=lambda name: float(iqm(table.attainment(name).ravel())), default=None)


def _cost_contenders(table: Table, policies: Sequence[str]) -> list[str]:
    """Native, the static that is best over all workloads, and every policy."""
    allowed = [name for name in table.statics if table.inside_budget(name)] or [NATIVE]
    overall = max(allowed, key=lambda name: float(iqm(table.attainment(name).ravel())))
    return list(dict.fromkeys([NATIVE, overall, *policies]))


def _rows(plan: Plan, store: Store, names: Sequence[str], seeds: int) -> list[list]:  # type: ignore[type-arg]
    return [
        [store.get(Cell(one, seed, name)) for seed in range(seeds)]
        for one, name in zip(plan.scenarios, names, strict=True)
    ]


def _random_search(plan: Plan, store: Store, stage: _Stage) -> dict[str, str]:
    """By workload, the best setting inside the budget on seeds of its own; native if none is inside."""
    names = [static_name(values) for values in plan.random]
    seeds = range(_SEARCH_SEED, _SEARCH_SEED + plan.search_seeds)
    stage("random search", [Cell(one, seed, name) for one in plan.scenarios for seed in seeds for name in names])
    choice = {}
    for one in plan.scenarios:
        rows = {name: [[store.get(Cell(one, seed, name)) for seed in seeds]] for name in names}
        table = Table((one,), rows, tuple(names), plan.quality_budget)
        means = {name: float(table.attainment(name).mean()) for name in names if table.inside_budget(name)}
        choice[one.text] = max(means, key=means.__getitem__, default=NATIVE)
    return choice


def _ladder(plan: Plan, store: Store, scenario: Scenario, name: str, seeds: Sequence[int]) -> Ladder:
    scores = [[store.get(Cell(scenario, seed, name, rate=rate)) for rate in plan.rates] for seed in seeds]
    own = [store.get(Cell(scenario, seed, name)) for seed in seeds]
    offered = sum(score.offered for score in own)
    calibration = store.setup.calibrations[scenario.source]
    # Requests that were refused generated nothing: tokens of a request are those of the ones that were served.
    served = max(1, sum(score.completed for score in own))
    tokens = sum(score.prompt_tokens for score in own) / max(1, offered) + sum(s.tokens for s in own) / served
    rps = calibration.rate_scale(scenario) * calibration.own_rps
    return Ladder(plan.rates, np.array([[s.attainment for s in row] for row in scores]), rps, tokens)


class _Stage:
    def __init__(self, store: Store, executor: Executor, progress: Progress) -> None:
        self._store, self._executor, self._progress = store, executor, progress

    def __call__(self, name: str, cells: Sequence[Cell]) -> None:
        missing = self._store.missing(cells)
        self._progress.stage(name, len(missing))
        done: Callable[[], None] = self._progress.done
        self._store.run(missing, self._executor, done)
