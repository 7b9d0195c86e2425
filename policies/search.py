"""Thresholds of a rules file, found by search over the simulator on training workloads. The cross-entropy method.

Every number in the conditions, every delay, whether a rule is there at all and what it sets are drawn around a mean
that moves towards the best candidates of each round. Candidates that the linter objects to are drawn again: rules that
flap by construction need no simulation. All candidates meet the same requests. Draws depend on the seed and on scores
alone, so a search that was stopped goes on where it was: scores are in the store.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import yaml

from engine.tunables import TUNABLES
from engine.whole_file import write_whole
from policies.evaluation.cells import Cell
from policies.evaluation.scenarios import Scenario
from policies.evaluation.store import Store
from policies.executors import Executor
from policies.lint import lint
from policies.named import UNBUDGETED
from policies.rules import RuleError, parse_rules
from policies.split import EVALUATION_SEED, HELD_OUT
from policies.strict_yaml import load_strict

_NUMBER: Final = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])")
_DURATIONS: Final = ("for", "release_for")
_TRIES: Final = 200
# Seeds of training: evaluation adds its own offset to every seed, so these are beyond what any evaluation draws.
TRAINING_SEED: Final = 2 * EVALUATION_SEED


@dataclass(frozen=True)
class Knot:
    """One thing that may differ: where it is in the file, and either a number around ``base`` or one of ``choices``."""

    path: tuple[Any, ...]
    base: float = 0.0
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True)
class SearchPlan:
    """``candidates`` per round, of which ``best`` move the mean. ``spread``: of the logarithm of numbers at first.

    ``scenarios`` must not be held out. ``over_price``: attainment that a loss of twice the quality budget costs.
    ``change_price``: attainment per change and hour.
    """

    scenarios: tuple[Scenario, ...]
    seeds: int = 2
    candidates: int = 12
    best: int = 3
    rounds: int = 10
    spread: float = 0.35
    seed: int = 0
    over_price: float = 0.3
    change_price: float = 1e-4

    def __post_init__(self) -> None:
        held_out = [one.source for one in self.scenarios if one.source in HELD_OUT]
        if held_out:
            raise ValueError(f"{held_out[0]} is held out for judging; search on training workloads")
        if not (self.scenarios and self.seeds >= 1 and self.rounds >= 1 and 1 <= self.best <= self.candidates):
            raise ValueError("a search needs workloads, seeds, rounds, and no more best ones than candidates")


@dataclass(frozen=True)
class Found:
    """``text``: the rules as YAML with their provenance. ``tried``: candidates; ``rounds``: that were finished."""

    text: str
    score: float
    base_score: float
    tried: int
    rounds: int


def search(
    base: str,
    plan: SearchPlan,
    store: Store,
    executor: Executor,
    *,
    out_of_time: Callable[[], bool] = lambda: False,
    told: Callable[[int, float, float], None] | None = None,
) -> Found:
    """The best rules found, at least as good as ``base`` (YAML) on the search's own workloads.

    ``out_of_time`` is asked between rounds. ``told`` gets each round, its best score and the base's. Raises RuleError
    for a base that is no rules file.
    """
    parse_rules(base)
    data = load_strict(base)
    knots = _knots(data)
    scorer = _Scorer(plan, store, executor)
    base_score = scorer.scores([data])[0]
    best, best_score, tried = data, base_score, 1
    mean = _Mean(knots, plan.spread)
    done = 0
    for turn in range(plan.rounds):
        if out_of_time():
            break
        rng = np.random.default_rng([plan.seed, turn])
        drawn = [_draw(data, knots, mean, rng) for _ in range(plan.candidates)]
        candidates = [candidate for candidate in drawn if candidate is not None]
        if not candidates:
            break
        scores = scorer.scores([one for one, _ in candidates])
        tried += len(candidates)
        order = sorted(range(len(candidates)), key=lambda place: -scores[place])
        if scores[order[0]] > best_score:
            best, best_score = candidates[order[0]][0], scores[order[0]]
        mean.move([candidates[place][1] for place in order[: plan.best]])
        done = turn + 1
        if told is not None:
            told(done, best_score, base_score)
    return Found(_text(best, plan, store, best_score, base_score, tried), best_score, base_score, tried, done)


class _Scorer:
    def __init__(self, plan: SearchPlan, store: Store, executor: Executor) -> None:
        self._plan, self._store, self._executor = plan, store, executor
        self._folder = store.folder / "candidates"
        self._folder.mkdir(exist_ok=True)

    def scores(self, candidates: Sequence[Mapping[str, Any]]) -> list[float]:
        """Of each, mean over workloads."""
        plan = self._plan
        paths = [self._write(candidate) for candidate in candidates]
        seeds = range(TRAINING_SEED, TRAINING_SEED + plan.seeds)
        # Rules have to keep the budget by themselves: the guard's would hide what they spend.
        cells = [[Cell(one, seed, f"{UNBUDGETED}{path}") for one in plan.scenarios for seed in seeds] for path in paths]
        self._store.run([cell for row in cells for cell in row], self._executor)
        return [self._score(row) for row in cells]

    def _score(self, cells: Sequence[Cell]) -> float:
        """Attainment, less what loss beyond the budget and changes cost."""
        plan, budget = self._plan, self._store.setup.quality_budget
        hours = self._store.setup.span.duration_s / 3600.0
        worth = []
        for one in plan.scenarios:
            scores = [self._store.get(cell) for cell in cells if cell.scenario == one]
            tokens = max(1, sum(score.tokens for score in scores))
            loss = sum(score.quality * score.tokens for score in scores) / tokens
            over = min(3.0, max(0.0, loss / budget - 1.0)) if budget else float(loss > 0)
            changes = float(np.mean([score.changes for score in scores])) / hours
            attained = float(np.mean([score.attainment for score in scores]))
            worth.append(attained - plan.over_price * over - plan.change_price * changes)
        return float(np.mean(worth))

    def _write(self, candidate: Mapping[str, Any]) -> str:
        text = yaml.safe_dump(dict(candidate), sort_keys=False, width=110)
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.yaml"
        write_whole(path, text)
        return str(path)


class _Mean:
    """Where candidates are drawn around: a normal for each number's logarithm, weights for each choice."""

    def __init__(self, knots: Sequence[Knot], spread: float) -> None:
        self._knots = knots
        self.centre = [0.0] * len(knots)
        self.spread = [spread] * len(knots)
        # What the base says is the first choice, and the likelier one.
        self.weights = [_weights(len(knot.choices), spread) for knot in knots]

    def move(self, best: Sequence[Sequence[Any]]) -> None:
        """Half of the way to what the best have in common."""
        for place, knot in enumerate(self._knots):
            values = [one[place] for one in best]
            if knot.choices:
                shares = np.array([sum(value == index for value in values) for index in range(len(knot.choices))])
                self.weights[place] = 0.5 * self.weights[place] + 0.5 * shares / shares.sum()
            else:
                self.centre[place] = 0.5 * self.centre[place] + 0.5 * float(np.mean(values))
                self.spread[place] = max(0.05, 0.6 * self.spread[place] + 0.4 * float(np.std(values)))


def _weights(number: int, spread: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    if not number:
        return np.ones(0)
    others = min(0.5, spread)
    return np.array([1.0 - others, *([others / max(1, number - 1)] * (number - 1))]) if number > 1 else np.ones(1)


def _knots(data: Mapping[str, Any]) -> list[Knot]:
    """Numbers in conditions, delays, presence of each rule, and lossy settings that may be milder."""
    found: list[Knot] = []
    for place, rule in enumerate(data["rules"]):
        found.append(Knot(("rules", place), choices=(True, False)))
        for key in ("when", "release"):
            numbers = _NUMBER.findall(str(rule.get(key, "")))
            found += [Knot(("rules", place, key, i), base=float(n)) for i, n in enumerate(numbers) if float(n) > 0]
        for key in _DURATIONS:
            seconds = float(re.sub(r"[^\d.]", "", str(rule.get(key, 0))) or 0)
            if seconds and str(rule[key]).rstrip("s").replace(".", "").isdigit():
                found.append(Knot(("rules", place, key), base=seconds))
        for knob, value in rule["set"].items():
            values = TUNABLES[knob].values
            if knob in {"kv_format", "keep_tokens", "block_size"} and value != TUNABLES["kv_format"].default:
                choices = tuple(dict.fromkeys([value, *(v for v in values if v != "native")]))
                found.append(Knot(("rules", place, "set", knob), choices=choices))
    return found


def _draw(
    data: Mapping[str, Any], knots: Sequence[Knot], mean: _Mean, rng: np.random.Generator
) -> tuple[dict[str, Any], list[Any]] | None:
    """A candidate that the linter has nothing against, and what was drawn for each knot; None when none comes up."""
    for _ in range(_TRIES):
        drawn: list[Any] = []
        for place, knot in enumerate(knots):
            if knot.choices:
                drawn.append(int(rng.choice(len(knot.choices), p=mean.weights[place])))
            else:
                drawn.append(float(rng.normal(mean.centre[place], mean.spread[place])))
        candidate = _applied(data, knots, drawn)
        try:
            if candidate["rules"] and not lint(parse_rules(yaml.safe_dump(candidate, sort_keys=False))):
                return candidate, drawn
        except (RuleError, ValueError):
            continue
    return None


def _applied(data: Mapping[str, Any], knots: Sequence[Knot], drawn: Sequence[Any]) -> dict[str, Any]:
    result: dict[str, Any] = deepcopy(dict(data))
    factors: dict[tuple[int, str], dict[int, float]] = {}
    dropped: set[int] = set()
    for knot, value in zip(knots, drawn, strict=True):
        match knot.path:
            case ("rules", place):
                if not knot.choices[value]:
                    dropped.add(place)
            case ("rules", place, "set", knob):
                result["rules"][place]["set"][knob] = knot.choices[value]
            case ("rules", place, key, index):
                factors.setdefault((place, key), {})[index] = math.exp(value)
            case ("rules", place, key):
                result["rules"][place][key] = f"{knot.base * math.exp(value):.2g}s"
    for (place, key), by_index in factors.items():
        result["rules"][place][key] = _scaled(str(data["rules"][place][key]), by_index)
    result["rules"] = [rule for place, rule in enumerate(result["rules"]) if place not in dropped]
    return result


def _scaled(text: str, factors: Mapping[int, float]) -> str:
    """The same condition with its numbers multiplied; whole numbers stay whole."""
    count = -1

    def replaced(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        if count not in factors:
            return match[0]
        value = float(match[0]) * factors[count]
        return str(max(1, round(value))) if "." not in match[0] and value >= 1 else f"{value:.3g}"

    return _NUMBER.sub(replaced, text)


def _text(data: Mapping[str, Any], plan: SearchPlan, store: Store, score: float, base_score: float, tried: int) -> str:
    setup = store.setup
    lines = [
        "Found by autotune tune-rules on training workloads only.",
        f"profile: {setup.profile.describe()}, digest {setup.profile.digest}",
        f"workloads: {', '.join(one.text for one in plan.scenarios)}",
        f"seeds: {plan.seeds} of {setup.span.duration_s:g} s each",
        f"search: seed {plan.seed}, {tried} candidates, score {score:.4f} against {base_score:.4f} of {data['name']}",
        f"score: attainment - {plan.over_price:g} x (loss / budget - 1) - {plan.change_price:g} x changes per hour",
        f"quality budget: {setup.quality_budget:g}",
    ]
    body = {**data, "name": "tuned", "description": f"{data.get('description', data['name'])}; thresholds searched"}
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(body, sort_keys=False, width=110)
