"""Looks after changes once they are made: judges each, takes back what missed, and bars what failed. Pure.

One change is judged once and rolled back at most once; a rollback itself is not judged, so nothing goes back and forth.
Changes within a window of each other cannot be told apart: they are judged, and taken back, together.
TTFT that may be of requests from before a change makes no miss of it: that waits, and stays unclear where it ends so.
What was rolled back is barred until the load is another one or the engine has restarted; its knob cools down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from envs.port import Change
from envs.spaces import Observation
from policies.base import Decision
from policies.guard import VerdictCode, Writer
from policies.judgement import FIGURES, WAITING, JudgeConfig, Outcome, drains, judge, without_first_tokens

WatchState = dict[str, Any]
"""JSON-able; journalled and restored. See :meth:`EffectWatch.initial_state`."""

Barred = Mapping[str, tuple[VerdictCode, str]]
"""By knob, or by ``knob=value``: why it may not be moved now."""

ROLLBACK: Final = "rollback"
CONDITIONS: Final = (
    ("offered_rps_long", 0.1),
    ("kv_demand", 0.05),
    ("prompt_tokens_p50", 16.0),
    ("output_tokens_p50", 16.0),
)
"""Observations that make a load, each with an amount below which a difference says nothing."""
_MOST_FAILED: Final = 32
_LONGEST_WINDOWS: Final = 6.0  # however long recoding is predicted to take, a judgement comes by then
_PATIENCE_WINDOWS: Final = 3.0  # how long a rollback is tried


@dataclass(frozen=True)
class WatchConfig:
    """``window_s``: of the observation's tails. ``cool_down_s``: how long a knob stays after a rollback.

    ``differs``: a load is another one when one of CONDITIONS is larger or smaller by more than this share.
    ``canary``: knobs whose coarse changes begin with one step. ``rolls_back``: whether misses are taken back, or only
    told.
    """

    judge: JudgeConfig
    window_s: float = 10.0
    cool_down_s: float = 60.0
    differs: float = 0.3
    canary: tuple[str, ...] = ()
    rolls_back: bool = True


@dataclass(frozen=True)
class Judgement:
    """What became of the change that was made at ``tick``."""

    tick: int
    outcome: Outcome
    why: str
    figures: dict[str, float | None]

    def to_json(self) -> dict[str, Any]:
        return {"outcome": str(self.outcome), "why": self.why}


class EffectWatch:
    """See the module. ``predict``: features by name as a change is predicted to leave them, and from when on (s)."""

    def __init__(
        self,
        config: WatchConfig,
        predict: Callable[[Change, Observation], tuple[dict[str, float], float] | None] | None = None,
    ) -> None:
        self.config = config
        self.predict = predict or (lambda _change, _observation: None)

    @staticmethod
    def initial_state() -> WatchState:
        """``instance``: the engine that it is about. ``open``: changes to be judged together. ``back``: rollbacks
        wanted.

        ``failed``: what was rolled back, under which conditions. ``cooling``: by knob, until when (ns). ``moved_ns``:
        when somebody else last moved a knob, or a rollback did; ``values``: the knobs in force when last seen.
        """
        return {
            "instance": None, "open": [], "back": [], "failed": [], "cooling": {}, "moved_ns": None, "values": {},
        }  # fmt: skip

    def look(
        self, observation: Observation, writers: Mapping[str, Writer], state: WatchState, own: str
    ) -> tuple[WatchState, list[Judgement]]:
        """The state at this observation, and what can be judged by now. ``own``: the daemon's name as a writer."""
        state = state if _is_usable(state) else self.initial_state()
        if observation.instance is None:
            return state, []
        if state["instance"] != observation.instance:
            gone = [
                Judgement(entry["tick"], Outcome.UNCLEAR, "the engine was restarted", {}) for entry in state["open"]
            ]
            return {
                **self.initial_state(),
                "instance": observation.instance,
                "values": dict(observation.tunables),
            }, gone
        now_ns, judged = observation.stamp_ns, []
        opened, back = (
            state["open"],
            [entry for entry in state["back"] if self._is_ours(entry, observation, writers, own)],
        )
        if state["values"] != dict(observation.tunables) and not opened:
            state = {**state, "moved_ns": now_ns}  # somebody else's doing
        if opened and now_ns >= min(opened[-1]["due_ns"], opened[0]["latest_ns"]):
            found = self._judge(opened, observation)
            if found is not None:
                outcome, why, figures = found
                judged = [Judgement(entry["tick"], outcome, why, figures) for entry in opened]
                if outcome is Outcome.MISSED and self.config.rolls_back:
                    back = self._to_take_back(opened, why, now_ns)
                opened = []
        cooling = {knob: until_ns for knob, until_ns in state["cooling"].items() if now_ns < until_ns}
        # While a knob cools down what it did may still show: no load to compare with.
        failed = [
            entry
            for entry in state["failed"]
            if entry["knob"] in cooling or not self._differs(entry["conditions"], observation)
        ]
        return {
            **state, "open": opened, "cooling": cooling, "failed": failed, "values": dict(observation.tunables),
            "back": [*back[1:], *back[:1]],  # each gets its turn, so that a refused one does not keep the others
        }, judged  # fmt: skip

    @staticmethod
    def wish(state: WatchState) -> Decision | None:
        """The rollback that is wanted now, None if none is."""
        if not state["back"]:
            return None
        back = state["back"][0]
        reason = f"{back['knob']}={back['value']} of tick {back['tick']} missed: {back['why']}"
        return Decision(Change(back["knob"], back["old"]), ROLLBACK, reason)

    def barred(self, state: WatchState) -> Barred:
        """What may not be done now, and why."""
        barred: dict[str, tuple[VerdictCode, str]] = {}
        state = state if _is_usable(state) else self.initial_state()
        for entry in state["failed"]:
            change = f"{entry['knob']}={entry['value']}"
            text = f"{change} was rolled back at tick {entry['tick']}; not tried again under the same load"
            barred[change] = (VerdictCode.FAILED_BEFORE, text)
        for knob in state["cooling"]:
            text = f"{knob}: cools down for {self.config.cool_down_s:g} s after a rollback"
            barred[knob] = (VerdictCode.COOL_DOWN, text)
        for entry in state["open"]:
            if entry["canary"]:
                text = f"{entry['knob']}={entry['value']} is a first step that has not been judged yet"
                barred[entry["knob"]] = (VerdictCode.CANARY, text)
        return barred

    def made(
        self, tick: int, change: Change, observation: Observation, state: WatchState, *, rollback: bool, canary: bool
    ) -> WatchState:
        """The state after a change has been written on what ``observation`` showed."""
        now_ns = observation.stamp_ns
        if rollback and state["back"]:
            back, *rest = state["back"]
            failed = {
                "knob": back["knob"], "value": back["value"], "tick": back["tick"],
                "conditions": back["conditions"],
            }  # fmt: skip
            cooling = {**state["cooling"], change.knob: now_ns + round(self.config.cool_down_s * 1e9)}
            kept = [*state["failed"], failed][-_MOST_FAILED:]
            return {**state, "back": rest, "failed": kept, "cooling": cooling, "moved_ns": now_ns}
        predicted, window_ns = self.predict(change, observation), round(self.config.window_s * 1e9)
        latest_ns = now_ns + round(_LONGEST_WINDOWS * window_ns)
        ready_ns = 0 if predicted is None else round(min(predicted[1], _LONGEST_WINDOWS * self.config.window_s) * 1e9)
        moved_ns = state["moved_ns"]
        entry = {
            "tick": tick, "knob": change.knob, "value": change.value, "old": observation.tunables[change.knob],
            "due_ns": now_ns + max(window_ns, ready_ns), "latest_ns": latest_ns, "canary": canary,
            "alone": moved_ns is None or not 0 <= now_ns - moved_ns < window_ns,
            "values": dict(observation.tunables),
            "before": {name: observation.values.get(name) for name in (*FIGURES, WAITING)},
            "conditions": {name: observation.values.get(name) for name, _ in CONDITIONS},
            "predicted": None if predicted is None else predicted[0],
        }  # fmt: skip
        return {**state, "open": [*state["open"], entry]}

    def _judge(
        self, opened: Sequence[Mapping[str, Any]], observation: Observation
    ) -> tuple[Outcome, str, dict[str, float | None]] | None:
        """Changes that lie within a window of each other, together: from before the first to after the last.

        None: it is too early to tell.
        """
        first, last = opened[0], opened[-1]
        after = {name: observation.values.get(name) for name in FIGURES}
        expected = {**first["values"], **{entry["knob"]: entry["value"] for entry in opened}}
        if not first["alone"] or dict(observation.tunables) != expected:
            return Outcome.UNCLEAR, "somebody else has moved a knob within a window", after
        # The last prediction is of the state after all of them.
        outcome, why = judge(first["before"], last["predicted"], after, self.config.judge)
        if outcome is Outcome.MISSED and self._drains(first, last, observation):
            outcome, why = judge(first["before"], last["predicted"], without_first_tokens(after), self.config.judge)
            if outcome is not Outcome.MISSED:
                if observation.stamp_ns < first["latest_ns"]:
                    return None
                outcome, why = Outcome.UNCLEAR, "requests that had come before it still get their first tokens"
        ticks = ", ".join(str(entry["tick"]) for entry in opened)
        return outcome, why if len(opened) == 1 else f"ticks {ticks} together: {why}", after

    def _drains(self, first: Mapping[str, Any], last: Mapping[str, Any], observation: Observation) -> bool:
        """Whether first tokens may still be of requests from before the last of several changes."""
        window_s = self.config.window_s
        since_s = (observation.stamp_ns - last["latest_ns"]) / 1e9 + _LONGEST_WINDOWS * window_s
        return drains(first["before"], observation.values, since_s, window_s)

    def _to_take_back(self, opened: Sequence[Mapping[str, Any]], why: str, now_ns: int) -> list[dict[str, Any]]:
        """By knob: from where the last change put it to where the first one found it. The conditions under which it
        failed are those before it: afterwards requests may be in hand for longer only because of it.
        """
        until_ns = now_ns + round(_PATIENCE_WINDOWS * self.config.window_s * 1e9)
        last = {entry["knob"]: entry for entry in opened}
        found = {entry["knob"]: entry["old"] for entry in reversed(opened)}
        return [
            {"tick": entry["tick"], "knob": knob, "value": entry["value"], "old": found[knob], "why": why,
             "until_ns": until_ns, "conditions": opened[0]["conditions"]}
            for knob, entry in last.items()
            if found[knob] != entry["value"]
        ]  # fmt: skip

    @staticmethod
    def _is_ours(back: Mapping[str, Any], observation: Observation, writers: Mapping[str, Writer], own: str) -> bool:
        """Whether the change to take back is still there, still the daemon's own, and not too old."""
        writer = writers.get(back["knob"])
        if observation.tunables.get(back["knob"]) != back["value"] or (writer is not None and writer.writer != own):
            return False
        return bool(observation.stamp_ns < back["until_ns"])

    def _differs(self, then: Mapping[str, float | None], observation: Observation) -> bool:
        for name, least in CONDITIONS:
            before, now = then.get(name), observation.values.get(name)
            if before is None or now is None or abs(now - before) <= least:
                continue
            if max(now, before) > (1 + self.config.differs) * min(now, before):
                return True
        return False


def _is_usable(state: WatchState) -> bool:
    """Whether a restored state has this version's shape; anything else is replaced by a fresh one."""
    kinds = {"open": list, "back": list, "failed": list, "cooling": dict, "values": dict}
    if not {"instance", "moved_ns"} <= set(state):
        return False
    if not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        return False
    keys = {
        "tick", "knob", "value", "old", "due_ns", "latest_ns", "canary", "alone", "values", "before", "conditions",
        "predicted",
    }  # fmt: skip
    lists = [(state["open"], keys), ([*state["failed"], *state["back"]], {"knob", "value", "tick", "conditions"})]
    return all(isinstance(entry, dict) and wanted <= set(entry) for entries, wanted in lists for entry in entries)
