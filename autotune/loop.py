"""The control loop, which is the LiveEngine environment's: observe, decide, guard, act, later look at what it did.

One thread, one monotonic tick. Nothing that goes wrong in a tick ends the loop: a lost engine, stale or impossible
figures and a failing policy all come down to "do nothing, and say so".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any, Final

from autotune.adapters.desk import KEY as RESTART_KEY
from autotune.collector import Health
from autotune.deliberation import Minds, Thought, made, think
from autotune.journal_file import Tick
from autotune.leaving import restore_engine
from autotune.loop_memory import Memory, restored
from autotune.parts import Parts, Settings
from autotune.reporter import Reporter
from autotune.rivals import Rivals
from autotune.ticker import Ticker
from engine.text import one_line
from envs.live import LiveEngine
from envs.port import ApplyResult, ApplyStatus
from envs.spaces import Observation, encode_action
from policies.base import Decision, Policy
from policies.guard import Verdict
from policies.guards import quality_status

_LOG: Final = logging.getLogger("autotune.loop")
# A change that never reached the engine may be tried again at once; the guard counts every other one as made.
_NOT_MADE: Final = frozenset({ApplyStatus.CONFLICT, ApplyStatus.LOST})
_MEMORY: Final = "loop"
_LATE_S: Final = 10.0
_CALLS: Final = 5  # the most that come one after the other between two marks


class Loop:
    """Drives ``parts`` until :meth:`stop`. ``run`` identifies this run in the journal, ``boot`` the machine's boot.

    ``before_turn`` is called once per turn, in the loop's thread: the place for reloads and status lines.
    """

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        *,
        run: str,
        boot: str = "",
        before_turn: Callable[[], None] | None = None,
    ) -> None:
        self.parts = parts
        self.settings = settings
        self.reporter = Reporter(parts)
        self.run_id, self._boot = run, boot
        self._before_turn = before_turn or (lambda: None)
        now_ns = parts.clock.now_ns()
        self._polls = Ticker(settings.poll_s, now_ns)
        self._ticks = Ticker(settings.tick_s, now_ns)
        self._memory = Memory(parts.minds.initial_states())
        self._rivals = Rivals()
        self._stopping = False
        self._marked_ns = self._due_ns = now_ns
        self._problem = ""
        self.ticks = 0
        self._told = self._tell()
        parts.env.reset()

    def run(self) -> None:
        """Turn until stopped. The engine's settings are left as they are when it ends."""
        while not self._stopping:
            self.parts.waiter.wait_until(self.turn())

    def stop(self) -> None:
        """End :meth:`run` soon. Safe in signal handlers and other threads."""
        self._stopping = True
        self.parts.waiter.wake()

    def turn(self) -> int:
        """Do what is due and return when the next thing is, in nanoseconds of the clock."""
        self._mark()
        self._before_turn()
        now_ns = self._mark()
        if self._polls.take(now_ns):
            self.parts.collector.poll()
            self._mark()
        if self._ticks.take(now_ns):
            self._tick()
        self._mark()
        self._due_ns = min(self._polls.next_ns, self._ticks.next_ns)
        return self._due_ns

    def alive(self) -> bool:
        """Whether the loop turns, for the watchdog: it is not late, or it has got on with its turn lately. It may wait
        for a few calls to the engine, each as long as its patience.
        """
        limit_ns = max(_LATE_S, _CALLS * self.settings.timeout_s) * 1e9
        return self.parts.clock.now_ns() - max(self._marked_ns, self._due_ns) < limit_ns

    def _mark(self) -> int:
        """Note that the loop gets on, and return when."""
        self._marked_ns = self.parts.clock.now_ns()
        return self._marked_ns

    def configure(self, settings: Settings, *, env: LiveEngine, minds: Minds) -> None:
        """Take new settings and parts between two ticks; a new policy starts with a state of its own."""
        parts, now_ns = self.parts, self.parts.clock.now_ns()
        self._polls.set_period(settings.poll_s, now_ns)
        self._ticks.set_period(settings.tick_s, now_ns)
        parts.collector.configure(long_s=settings.long_s, stale_after_s=settings.stale_after_s)
        parts.actuator.mode = settings.mode
        if env is not parts.env:
            env.reset()
        if minds.policy is not parts.minds.policy:
            self._forget_policy(minds.policy)
        parts.env, parts.minds = env, minds
        self.settings = settings

    def set_mode(self, mode: str) -> None:
        """Take another mode from the next tick on."""
        self.settings.mode = self.parts.actuator.mode = mode

    def restore(self) -> bool:
        """Go on where the journal's last run stopped; False when that was in another boot, or cannot be used."""
        memory = restored(self.parts.journal.recall(_MEMORY), self.parts.minds, self._boot)
        if memory is None:
            return False
        self._memory = memory
        return True

    def restore_engine(self) -> None:
        """Set every knob that is still as the daemon left it to what its first change replaced; tell and journal it."""
        restore_engine(self.parts, self.reporter, self._memory.replaced, run=self.run_id, mode=self.settings.mode)

    def _tick(self) -> None:
        parts = self.parts
        tick = parts.journal.next_id
        parts.journal.next_id += 1
        self.ticks += 1
        try:
            self._problem = ""
            acted, body = self._control(tick)
            acted = self._restarts(tick, body) or acted
            self._told = self._tell()
            self._memory.lived()
        except Exception as error:  # noqa: BLE001  # one tick must never end the loop
            parts.metrics.tick_errors.inc()
            _LOG.exception("tick %d failed", tick)
            self._problem = one_line(f"tick failed: {error!r}")
            acted, body = False, {"scenario": "tick_error", "reason": self._problem}
            self._memory.failed(parts.minds)
        parts.journal.append(
            Tick(tick, self.run_id, parts.clock.wall_s(), parts.clock.now_ns(), acted, body),
            _MEMORY,
            self._memory.to_json(self._boot, parts.minds.policy.name),
        )
        self.reporter.publish(
            self.settings, ticks=self.ticks, missed_ticks=self._ticks.missed, problem=self._problem, **self._told
        )

    def _tell(self) -> dict[str, dict[str, Any]]:
        """What the states say to people: what is barred, and how the quality budget stands."""
        minds, states = self.parts.minds, self._memory.states
        barred = {what: text for what, (_, text) in minds.watch.barred(states.watch).items()}
        return {"barred": barred, "quality": quality_status(minds.guard, states.guard)}

    def _control(self, tick: int) -> tuple[bool, dict[str, Any]]:
        """One tick; whether there was a decision, and what the journal keeps."""
        parts, memory = self.parts, self._memory
        if parts.collector.health is Health.GONE:
            parts.actuator.forget()  # asking once more would only wait once more
        else:
            parts.actuator.refresh()
        _, reward, _, _, info = parts.env.observe()
        observation: Observation = info["observation"]
        self._notice_instance(observation.instance)
        others = self.reporter.other_writers(tick)
        for record in others:  # what a person has set is what the daemon's next change replaces
            memory.replaced.pop(record.knob, None)
        self.reporter.effects(observation)
        writers = parts.actuator.writers()
        view, now_ns = parts.actuator.view, parts.clock.now_ns()
        rival = "" if view is None else self._rivals.objection(view["instance"], writers, now_ns)
        health = parts.collector.health
        body: dict[str, Any] = {
            "health": health,
            "mode": self.settings.mode,
            "policy": parts.minds.policy.name,
            "observation": observation.to_json(),
            "writers": {knob: astuple(writer) for knob, writer in writers.items()},
            "charge": [info["charge"].tokens, info["charge"].loss],
            **memory.states.to_json(),
            "reward": reward,
            "overrides_begun": [record.to_json() for record in others],
        }
        if health is not Health.OK or parts.actuator.view is None:
            problem = parts.collector.problem or parts.actuator.last_error
            reason = f"holding: engine {health} {problem}".rstrip()
            return bool(others), {**body, "scenario": f"engine_{health}", "reason": reason}
        if rival:
            self._problem = rival
            return bool(others), {**body, "scenario": "other_daemon", "reason": f"holding: {rival}"}
        thought = think(parts.minds, observation, writers, memory.states, info["charge"])
        self._notice_error(thought)
        decision, verdict, before = thought.final, thought.verdict, memory.states
        result = self._act(decision, verdict)
        if result is not None and verdict.change is not None:
            self._rivals.wrote(verdict.change, result)
        kept = thought.to_json()
        if result is not None and result.took_effect and result.change is not None:
            thought = made(parts.minds, thought, result.change, tick, observation)
            memory.replaced.setdefault(result.change.knob, observation.tunables[result.change.knob])
        memory.states = thought.states
        if result is not None and result.status in _NOT_MADE:
            # What has been generated is paid for, whatever became of the change.
            guard = {**before.guard, "quality": thought.states.guard["quality"]}
            memory.states = replace(memory.states, guard=guard)
        self.reporter.judged(thought.judged)
        told = self.reporter.decision(tick, observation, decision, verdict, result, self.settings, thought.predicted)
        return told is not None or bool(others), {
            **body,
            **kept,
            "written": None if result is None else [result.status, result.why, result.revision],
            "decision": None if told is None else told.to_json(),
        }

    def _restarts(self, tick: int, body: dict[str, Any]) -> bool:
        """Beside an engine that takes its settings at its start: weigh a restart, or see one through."""
        desk, collector = self.parts.restarts, self.parts.collector
        if desk is None:
            return False
        reading = collector.latest if collector.health is Health.OK else None
        told = desk.tick(tick, reading, lambda: collector.window(self.settings.window_s), mode=self.settings.mode)
        body["restart"] = told.body
        if told.records:
            body["restarts"] = [record.to_json() for record in told.records]
        if told.keep is not None:
            self.parts.journal.remember(RESTART_KEY, told.keep)
        self.reporter.restart(told.records, told.effect)
        return bool(told.records)

    def _notice_instance(self, instance: str | None) -> None:
        memory = self._memory
        if instance is None:
            return
        if memory.instance not in {None, instance}:
            # What a policy remembered of another instance says nothing about this one.
            self._forget_policy(self.parts.minds.policy)
            memory.replaced = {}
        memory.instance = instance

    def _forget_policy(self, policy: Policy) -> None:
        self._memory.states = replace(self._memory.states, policy=policy.initial_state())

    def _notice_error(self, thought: Thought) -> None:
        if thought.error is None:
            return
        self.parts.metrics.policy_errors.inc()
        _LOG.error("policy %s failed; nothing is changed", self.parts.minds.policy.name, exc_info=thought.error)
        self._problem = thought.decision.reason

    def _act(self, decision: Decision, verdict: Verdict) -> ApplyResult | None:
        if verdict.change is None:
            return None
        self.parts.actuator.reason = f"{decision.scenario}: {decision.reason}"
        return self.parts.env.act(encode_action(verdict.change))
