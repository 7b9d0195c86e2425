"""Decides recorded ticks again and compares, bit for bit: what ``autotune replay-decisions`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from autotune.config import Config
from autotune.deliberation import Minds, States, think
from autotune.journal_file import Tick
from autotune.run_document import RunError, read_run
from envs.reward import Charge
from envs.spaces import Observation
from policies.guard import Writer
from policies.rules import RuleSet

_COMPARED: Final = ("scenario", "reason", "proposal", "verdict", "judged", "predicted", "after")
_LATE: Final = "too-late:"  # how a learned policy begins a reason that depended on how long it took
_MOST_LINES: Final = 20

Maker = Callable[[Config, RuleSet], Minds]


@dataclass
class Replayed:
    """How many ticks came out how; ``lines`` tell of the first that did not come out the same."""

    same: int = 0
    held: int = 0  # nothing was decided: the engine was away, stale or wrong
    differ: int = 0
    damaged: int = 0
    impossible: int = 0  # the run's policy cannot be made again, or the outcome hung on time
    lines: list[str] = field(default_factory=list)

    @property
    def ticks(self) -> int:
        return self.same + self.held + self.differ + self.damaged + self.impossible

    def tell(self, line: str) -> None:
        if len(self.lines) < _MOST_LINES:
            self.lines.append(line)

    def summary(self) -> str:
        parts = [f"{self.same} decided the same", f"{self.held} held without deciding", f"{self.differ} differ"]
        parts += [f"{self.damaged} damaged"] if self.damaged else []
        parts += [f"{self.impossible} cannot be decided again"] if self.impossible else []
        return f"{self.ticks} ticks: {', '.join(parts)}"


class Rethinker:
    """Keeps what decides per run; ``runs`` are the journal's documents, ``maker`` builds from them."""

    def __init__(self, runs: Mapping[str, Mapping[str, Any]], maker: Maker) -> None:
        self._runs, self._maker = runs, maker
        self._made: dict[str, Minds | str] = {}

    def replay(self, ticks: Iterable[Tick]) -> Replayed:
        """Decide every tick again."""
        result = Replayed()
        for tick in ticks:
            self._one(tick, result)
        return result

    def _one(self, tick: Tick, result: Replayed) -> None:
        body = tick.body
        if tick.damaged:
            result.damaged += 1
            result.tell(f"{tick.id}: damaged: {tick.damaged}")
        elif body.get("scenario") == "tick_error":
            result.impossible += 1
            result.tell(f"{tick.id}: {body.get('reason')}")
        elif "verdict" not in body:
            result.held += 1
        elif str(body.get("reason", "")).startswith(_LATE):
            result.impossible += 1
            result.tell(f"{tick.id}: the policy had run out of time, which cannot be repeated")
        else:
            self._compare(tick, result)

    def _compare(self, tick: Tick, result: Replayed) -> None:
        made = self._parts(tick.run)
        if isinstance(made, str):
            result.impossible += 1
            result.tell(f"{tick.id}: run {tick.run}: {made}")
            return
        body = tick.body
        try:
            observation = Observation.from_json(body["observation"])
            writers = {knob: Writer(*entry) for knob, entry in body["writers"].items()}
            again = think(made, observation, writers, States.from_json(body), Charge(*body["charge"])).to_json()
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            result.damaged += 1
            result.tell(f"{tick.id}: cannot be read: {error!r:.80}")
            return
        differing = [name for name in _COMPARED if again[name] != body.get(name)]
        if not differing:
            result.same += 1
            return
        result.differ += 1
        name = differing[0]
        result.tell(f"{tick.id}: {name} was {body.get(name)!r:.150}, is {again[name]!r:.150}")

    def _parts(self, run: str) -> Minds | str:
        if run not in self._made:
            self._made[run] = self._make(run)
        return self._made[run]

    def _make(self, run: str) -> Minds | str:
        if run not in self._runs:
            return "the journal does not hold its configuration"
        try:
            return self._maker(*read_run(self._runs[run]))
        except RunError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  # files of long ago may be anything by now
            return f"its policy cannot be made again: {error!r:.150}"
