"""The daemon process: the loop with what surrounds it (signals, service manager, admin port, housekeeping, reload)."""

from __future__ import annotations

import logging
import signal
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from prometheus_client import CollectorRegistry

from autotune.adapters.desk import KEY as RESTART_KEY
from autotune.adapters.wire import rules_of
from autotune.admin import AdminServer
from autotune.admin_parts import admin_server
from autotune.commands import Commands
from autotune.config import Config, ConfigError, load_config
from autotune.deliberation import Minds
from autotune.housekeeping import Housekeeping
from autotune.loop import Loop
from autotune.metrics import MODES
from autotune.parts import Parts
from autotune.reload import Reload, plan_reload
from autotune.run_document import file_digests, in_force, rules_document, run_document
from autotune.wiring import check_rules, env_of, guard_of, policy_of, settings_of, watch_of
from engine.clock import Clock
from engine.sdnotify import Notifier, Watchdog, watchdog_interval_s
from policies.choice import choice_of
from policies.guards import what_holds
from policies.rules import RuleSet
from policies.stand_in import refusal_of

_LOG: Final = logging.getLogger("autotune.daemon")
_ORDERED_MODE: Final = "ordered mode"


@dataclass(frozen=True)
class Surroundings:
    """What the daemon gets from outside.

    ``pid`` and ``environment`` are the process's own; ``boot`` identifies the boot of the machine, without which the
    monotonic times of an earlier run mean nothing.
    """

    clock: Clock
    registry: CollectorRegistry
    environment: Mapping[str, str]
    pid: int
    boot: str


class Daemon:
    """Runs the loop until SIGTERM or SIGINT; SIGHUP reloads ``config_path`` whole or not at all."""

    def __init__(
        self, config_path: Path | None, config: Config, rules: RuleSet, parts: Parts, around: Surroundings
    ) -> None:
        self._path, self._config, self._rules = config_path, config, rules
        self._parts, self._around = parts, around
        self._files = file_digests(config)
        self._run_id = uuid.uuid4().hex[:12]
        self.loop = Loop(parts, settings_of(config), run=self._run_id, boot=around.boot, before_turn=self._before_turn)
        self.notifier = Notifier.from_environment(around.environment, around.clock)
        self._reload_wanted, self._reloads, self._mode_by = False, 0, "configuration"
        self.last_reload: Reload | None = None
        self._status_line = ""
        self.admin: AdminServer | None = None
        self._commands = Commands(parts.waiter.wake)
        self._jobs = Housekeeping(parts.clock, parts.metrics.count_job)
        self._jobs.every(config.housekeeping.prune_every_s, "journal-prune", self._prune)
        if config.admin.enabled:
            actions = {"mode": self._order_mode, "reload": self._order_reload}
            self.admin = admin_server(
                config.admin, parts, around.registry, self.status, actions, self._commands, process=self._run_id
            )

    def run(self) -> None:
        """Serve until stopped; everything that was started is stopped when it returns or raises."""
        parts, around = self._parts, self._around
        parts.journal.start_run(self._run_id, run_document(in_force(self._config, parts.minds.policy), self._rules))
        self._tell_choice()
        self.restore()
        _LOG.info("%s", what_holds(parts.minds.guard))
        interval_s = watchdog_interval_s(around.environment, around.pid)
        watchdog = Watchdog(self.notifier, interval_s, self.loop.alive) if interval_s is not None else None
        try:
            if self.admin is not None:
                self.admin.start()
                _LOG.info("page, metrics and decisions at %s", self.admin.address)
            self._jobs.start()
            if watchdog is not None:
                watchdog.start()
            self.loop.turn()  # one look at the engine, so that the first status says something
            self.notifier.ready(self._line())
            self.loop.run()
        finally:
            restores = self._config.on_exit == "restore"
            self.notifier.stopping(f"stopping; the engine's settings are {'restored' if restores else 'left'}")
            if restores:
                self.loop.restore_engine()
            if watchdog is not None:
                watchdog.stop()
            self._jobs.stop()
            if self.admin is not None:
                self.admin.stop()
            parts.journal.close()

    def restore(self) -> None:
        """Take up what the run before has left: states, a restart that was under way, and the mode that was ordered."""
        self.loop.restore()
        if self._parts.restarts is not None:
            self._parts.restarts.restore(self._parts.journal.recall(RESTART_KEY))
        ordered = self._parts.journal.recall(_ORDERED_MODE)
        if ordered in MODES:
            self.order_mode(ordered)

    def install_signal_handlers(self) -> None:
        """SIGTERM and SIGINT stop, SIGHUP reloads. For the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)

    def request_reload(self) -> None:
        """Reload between two ticks; asking twice before it happens reloads once."""
        self._reload_wanted = True
        self._parts.waiter.wake()

    def status(self) -> Mapping[str, Any]:
        """What ``/status`` shows; callable from any thread."""
        reload = self.last_reload
        shown = None
        if reload is not None:
            shown = {
                "applied": reload.applied,
                "needs_restart": reload.needs_restart,
                "rejected": reload.rejected,
            }
        shown_status = self.loop.reporter.status
        if not self.loop.alive():
            shown_status = {**shown_status, "healthy": False, "problem": "the control loop is stuck"}
        return {**shown_status, "mode_by": self._mode_by, "run": self.loop.run_id, "last_reload": shown}

    def order_mode(self, mode: str) -> str:
        """Switch the mode until another order, or a reload that changes the configured one. In the loop's thread.

        It is kept in the journal: a restart must not bring back a daemon that writes.
        """
        was, self._mode_by = self.loop.settings.mode, "order"
        self.loop.set_mode(mode)
        self._parts.journal.remember(_ORDERED_MODE, mode)
        _LOG.info("mode %s by order, was %s", mode, was)
        return f"mode {mode}, was {was}; holds over restarts until another order, or a reload that changes `mode`"

    def reload(self) -> Reload:
        """Read the file again and take it whole or not at all; the service manager hears of it in every case."""
        self.notifier.reloading()
        try:
            outcome = self._take(self._path)
        except ConfigError as error:
            outcome = Reload(self._config, [], [], error.problems)
        except Exception as error:  # noqa: BLE001  # a reload must never end the daemon
            _LOG.exception("reload failed")
            outcome = Reload(self._config, [], [], [f"reload failed: {error}"])
        self.last_reload = outcome
        self._parts.metrics.reloads.labels("rejected" if outcome.rejected else "applied").inc()
        _LOG.log(logging.ERROR if outcome.rejected else logging.INFO, "%s", outcome.summary())
        self.notifier.ready(outcome.summary())
        return outcome

    def _take(self, path: Path | None) -> Reload:
        if path is None:
            return Reload(self._config, [], [], ["there is no configuration file to reload"])
        plan = plan_reload(self._config, load_config(path))
        if plan.rejected:
            return plan
        rules = check_rules(plan.config)
        parts, old, new = self._parts, self._config, plan.config
        # Everything is built before anything is replaced.
        windows = ("targets", "objective", "window_s", "long_window_s")
        same_profile = old.policy.profile == new.policy.profile
        same_env = same_profile and all(getattr(old, name) == getattr(new, name) for name in windows)
        env = parts.env if same_env else env_of(new, parts.actuator, parts.clock)
        settings = settings_of(new)
        if "mode" in plan.applied:
            parts.journal.remember(_ORDERED_MODE, None)
            self._mode_by = "configuration"
        elif self._mode_by == "order":
            settings.mode = self.loop.settings.mode
        same_rules = rules_document(rules) == rules_document(self._rules)
        files = file_digests(new)
        same_files = files == self._files
        same_policy = same_rules and same_files and old.policy == new.policy and old.targets == new.targets
        # Rules that stand in are not what the file asks for: a reload tries for that, and is refused without it.
        same_policy = same_policy and not refusal_of(parts.minds.policy)
        policy = parts.minds.policy if same_policy else policy_of(new, rules, parts.clock)
        minds = Minds(policy, guard_of(new), watch_of(new))
        self.loop.configure(settings, env=env, minds=minds)
        if parts.restarts is not None:
            parts.restarts.rules = rules_of(new)
        if not same_files and old.policy == new.policy:
            plan.applied.append("policy (the content of its files)")
        self._config, self._rules, self._files = new, rules, files
        if not same_policy:
            self._tell_choice()
            _LOG.info("%s", what_holds(minds.guard))
        if not same_rules and "policy.rules" not in plan.applied:
            plan.applied.append("policy.rules (the file's content)")
        # Ticks from here on are decided differently: a run of their own, or the earlier ones could not be replayed.
        self._reloads += 1
        self.loop.run_id = f"{self._run_id}.{self._reloads}"
        parts.journal.start_run(self.loop.run_id, run_document(in_force(new, policy), rules))
        return plan

    def _order_mode(self, wanted: Mapping[str, object]) -> dict[str, Any]:
        mode = wanted.get("mode")
        if mode not in MODES or set(wanted) != {"mode"}:
            raise ValueError(f"the mode must be one of {', '.join(MODES)}")
        return {"answer": self.order_mode(str(mode))}

    def _order_reload(self, wanted: Mapping[str, object]) -> dict[str, Any]:
        if wanted:
            raise ValueError("a reload takes nothing; it reads the file that the daemon was started with")
        outcome = self.reload()
        if outcome.rejected:
            raise ValueError(outcome.summary())
        return {"answer": outcome.summary(), "needs_restart": outcome.needs_restart}

    def _before_turn(self) -> None:
        self._commands.carry_out()
        self._jobs.rearm()
        if self._reload_wanted:
            self._reload_wanted = False
            self.reload()
        line = self._line()
        if line != self._status_line and self.loop.ticks:
            self._status_line = line
            self.notifier.status(line)
            _LOG.info("%s", line)

    def _tell_choice(self) -> None:
        policy = self._parts.minds.policy
        choice, refusal = choice_of(policy), refusal_of(policy)
        if refusal:
            _LOG.error("%s; %s decides in its place until a reload can take it", refusal, policy.name)
        for line in choice.lines() if choice is not None else ():
            _LOG.info("%s", line)

    def _line(self) -> str:
        status = self.loop.reporter.status
        line = f"{status.get('mode', self._config.mode)}; engine {status.get('engine', 'not seen yet')}"
        if status.get("problem"):
            line += f": {status['problem']}"
        if status.get("policy_refused"):
            line += f"; {status['policy']} in place of a policy that cannot be used"
        overrides = status.get("overrides")
        return line + (f"; left alone: {', '.join(overrides)}" if overrides else "")

    def _prune(self) -> None:
        self._parts.journal.prune(self._config.journal.max_rows, self._config.journal.max_bytes)

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self.loop.stop()

    def _on_reload(self, _number: int, _frame: FrameType | None) -> None:
        self.request_reload()
