"""What people and machines are told about the loop's work: decisions, other writers, effects, metrics, status."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from autotune.collector import Health
from autotune.dashboard.plots import plotted
from autotune.decisions import DecisionRecord
from autotune.effects import PendingEffects
from autotune.metrics import Snapshot
from autotune.parts import Parts, Settings
from autotune.writers import OWN_WRITER, until_text
from engine.tunables import TunableValue
from envs.port import ApplyResult, ApplyStatus, Change
from envs.spaces import Observation
from envs.window import StatsWindow
from policies.base import Decision
from policies.choice import choice_of
from policies.guard import Verdict, Writer
from policies.quality_budget import QUALITY_KNOBS
from policies.rollback import Judgement
from policies.stand_in import refusal_of

_LOG: Final = logging.getLogger("autotune.decisions")


class Reporter:
    """Turns what the loop does into records. Owned by the loop's thread; ``status`` may be read by others."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pending = PendingEffects()
        self._seen_writers: dict[str, Writer] | None = None
        self._seen_values: dict[str, TunableValue] = {}
        self._refused: dict[str, tuple[Change, str]] = {}  # by knob, the refusal that was told last
        self._last_written_ns: int | None = None
        self.status: dict[str, Any] = {"healthy": False}
        """Replaced whole at every tick."""

    def effects(self, observation: Observation) -> None:
        """Add to earlier decisions what they did, as far as it can be told now."""
        for tick, effect in self._pending.due(observation):
            self._parts.journal.set_effect(tick, effect)
            self._parts.decisions.set_effect(tick, effect)

    def judged(self, judgements: Sequence[Judgement]) -> None:
        """Add to earlier decisions whether they did what was expected."""
        for judgement in judgements:
            self._parts.journal.set_outcome(judgement.tick, str(judgement.outcome), judgement.why)
            self._parts.decisions.set_effect(judgement.tick, judgement.to_json())
            self._parts.metrics.judged_changes.labels(str(judgement.outcome)).inc()
            about = {"decision": judgement.tick}
            _LOG.info("[%d] %s: %s", judgement.tick, judgement.outcome, judgement.why, extra=about)

    def decision(
        self,
        tick: int,
        observation: Observation,
        decision: Decision,
        verdict: Verdict,
        result: ApplyResult | None,
        settings: Settings,
        predicted: Mapping[str, float] | None = None,
    ) -> DecisionRecord | None:
        """Count a proposal and show it; None for nothing new: a refusal that repeats at every tick is told once."""
        change = decision.change
        if change is None:
            self._refused.clear()
            return None
        if not verdict.is_decision:
            self._refused.pop(change.knob, None)
            return None
        written = verdict.change or change
        outcome, why = _outcome(verdict, result, settings.mode)
        self._parts.metrics.count_decision(written.knob, written.value, decision.scenario, OWN_WRITER, outcome)
        took_effect = result is not None and result.took_effect
        if not took_effect and self._refused.get(written.knob) == (written, outcome):
            return None
        if took_effect:
            self._refused.pop(written.knob, None)
        else:
            self._refused[written.knob] = (written, outcome)
        record = DecisionRecord(
            tick=tick,
            wall_s=self._parts.clock.wall_s(),
            knob=written.knob,
            old=observation.tunables.get(written.knob),
            new=written.value,
            scenario=decision.scenario,
            reason=decision.reason,
            writer=OWN_WRITER,
            verdict=outcome,
            why=why,
            predicted=predicted,
        )
        self._show(record)
        if took_effect:
            self._last_written_ns = self._parts.clock.now_ns()
            self._pending.add(tick, observation, settings.window_s)
        return record

    def at_exit(
        self, tick: int, knob: str, old: TunableValue | None, new: TunableValue, result: ApplyResult
    ) -> DecisionRecord:
        """Tell of a knob that is set back because the daemon stops."""
        record = DecisionRecord(
            tick, self._parts.clock.wall_s(), knob, old, new, "exit", self._parts.actuator.reason, OWN_WRITER,
            str(result.status), result.why,
        )  # fmt: skip
        self._show(record)
        return record

    def restart(self, records: Sequence[DecisionRecord], effect: tuple[int, dict[str, Any]] | None) -> None:
        """Tell of a restart: what is advised or begun, and, of an earlier tick's, what became of it."""
        for record in records:
            self._parts.metrics.count_decision(record.knob, record.new, record.scenario, record.writer, record.verdict)
            self._show(record)
            if record.verdict == "applied":
                self._last_written_ns = self._parts.clock.now_ns()
        if effect is not None:
            self._parts.journal.set_effect(*effect)
            self._parts.decisions.set_effect(*effect)

    def other_writers(self, tick: int) -> list[DecisionRecord]:
        """Tell once about every write by somebody else. The first look only learns what is there."""
        view = self._parts.actuator.view
        if view is None:
            return []
        writers = self._parts.actuator.writers()
        seen, self._seen_writers = self._seen_writers, writers
        values, self._seen_values = self._seen_values, dict(view["desired"])
        records = []
        for knob in (seen or {}).keys() - writers.keys():
            _LOG.info("%s is the daemon's again", knob)
        for knob, writer in writers.items():
            if seen is None or seen.get(knob) == writer or writer.writer == OWN_WRITER:
                continue
            record = DecisionRecord(
                tick=tick,
                wall_s=self._parts.clock.wall_s(),
                knob=knob,
                old=values.get(knob),
                new=view["desired"][knob],
                scenario="override",
                reason=writer.reason,
                writer=writer.writer,
                verdict="applied",
                why=self._left_alone(knob, writer),
            )
            self._parts.metrics.count_decision(knob, record.new, "override", writer.writer, "applied")
            self._show(record)
            records.append(record)
        return records

    def publish(
        self,
        settings: Settings,
        *,
        ticks: int,
        missed_ticks: int,
        problem: str,
        barred: Mapping[str, str],
        quality: dict[str, Any],
    ) -> None:
        """Give the other threads a new picture; ``problem`` is what went wrong in the loop itself, if anything,
        ``barred`` what is not tried at present after a rollback, with why, ``quality`` how the quality budget stands.
        """
        parts = self._parts
        health, overrides = parts.collector.health, parts.actuator.overrides()
        age_s = math.nan
        if self._last_written_ns is not None:
            age_s = (parts.clock.now_ns() - self._last_written_ns) / 1e9
        latest, choice = parts.collector.latest, choice_of(parts.minds.policy)
        refusal = refusal_of(parts.minds.policy)
        parts.metrics.snapshot = Snapshot(
            health=health,
            mode=settings.mode,
            reading=None if health is Health.GONE else latest,
            window=parts.collector.window(settings.window_s) if health is Health.OK else StatsWindow(None, None),
            ttft_target_s=settings.ttft_target_s,
            tbt_target_s=settings.tbt_target_s,
            overridden=frozenset(overrides),
            seconds_since_change=age_s,
            policy=parts.minds.policy.name,
            choice=choice,
            is_policy_refused=bool(refusal),
            quality_budget=_known(quality["budget"]),
            lost_per_token=_known(quality["lost_per_token"]),
            ticks=ticks,
            missed_ticks=missed_ticks,
            polls=replace(parts.collector.counters),
            journal=replace(parts.journal.counters),
        )
        observation = parts.env.observation
        point = plotted(observation, parts.collector.fresh, settings.ttft_target_s, settings.tbt_target_s)
        parts.plots.add(parts.clock.now_ns(), parts.clock.wall_s(), point)
        self.status = {
            "healthy": health is Health.OK and not problem,
            "engine": health,
            "problem": parts.collector.problem or parts.actuator.last_error or problem,
            "mode": settings.mode,
            "policy": parts.minds.policy.name,
            "policy_refused": refusal,
            "policy_choice": None if choice is None else choice.to_json(),
            "instance": None if latest is None else latest.instance,
            "model": None if latest is None else latest.model,
            "at_s": parts.clock.wall_s(),
            "tunables": {} if latest is None else dict(latest.effective),
            "overrides": {knob: f"{self._who(writer)}: {writer.reason}" for knob, writer in overrides.items()},
            "barred": dict(barred),
            "restart": None if parts.restarts is None else parts.restarts.status(),
            "observed_s": observation.observed_s,
            "window_s": settings.window_s,
            "tick_s": settings.tick_s,
            "quality": {**quality, "exempt": sorted(overrides.keys() & QUALITY_KNOBS)},
            "values": dict(observation.values),
            "tick": parts.journal.next_id - 1,
            "seconds_since_change": age_s,
            "journal": {"path": str(parts.journal.path), "last_error": parts.journal.counters.last_error},
        }

    def _who(self, writer: Writer) -> str:
        return f"{writer.writer} {self._until(writer)}".rstrip()

    def _until(self, writer: Writer) -> str:
        clock = self._parts.clock
        return "" if writer.until_ns is None else until_text(writer.until_ns, clock.now_ns(), clock.wall_s())

    def _left_alone(self, knob: str, writer: Writer) -> str:
        until = self._until(writer)
        return f"set by {writer.writer}; left alone {f'{until}, or ' if until else ''}until `autotune release {knob}`"

    def _show(self, record: DecisionRecord) -> None:
        self._parts.decisions.append(record)
        _LOG.info("%s", record.line(), extra={"decision": record.tick})


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _outcome(verdict: Verdict, result: ApplyResult | None, mode: str) -> tuple[str, str]:
    """The word for what became of a proposal, and why."""
    if verdict.change is None:
        return str(verdict.code), verdict.text
    if result is None:
        return "masked", "the environment does not allow this action now"
    if result.status is ApplyStatus.REFUSED and mode != "active":
        return "advised" if mode == "advise" else "off", result.why
    return str(result.status), result.why
