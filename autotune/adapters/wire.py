"""From the configuration to a watched engine and the desk that decides about its restarts."""

from __future__ import annotations

from autotune.adapters.base import RestartableEngine
from autotune.adapters.control import WatchedEngine
from autotune.adapters.desk import RestartDesk, Rules
from autotune.adapters.find import adapter_of
from autotune.adapters.restart import Restarter
from autotune.adapters.restart_work import RestartPlan
from autotune.config import Config, ConfigError
from engine.clock import Clock
from envs.signals import Targets
from policies.restart_advice import Terms


def watched_engine(config: Config, clock: Clock) -> WatchedEngine | None:
    """The engine of another make that a configuration names, None where it names ours.

    Raises ConfigError for an address that is none.
    """
    section = config.engine
    if section.kind == "autotune" or section.url is None:
        return None
    try:
        adapter = adapter_of(section.kind, section.url, clock, timeout_s=section.timeout_s)
    except ValueError as error:
        raise ConfigError([f"engine.url: {error}"]) from error
    return WatchedEngine(adapter, section.label)


def desk_of(config: Config, engine: RestartableEngine, clock: Clock) -> RestartDesk:
    """With a restarter only where the configuration says what to write and to run."""
    section, restarter = config.restart, None
    if section.file is not None and section.commands:
        plan = RestartPlan(
            section.file, section.form, section.commands, section.drain, section.drain_s, section.ready_s
        )
        restarter = Restarter(engine, plan)
    return RestartDesk(engine, restarter, rules_of(config), clock)


def rules_of(config: Config) -> Rules:
    """What a reload may change."""
    section, targets = config.restart, config.targets
    return Rules(
        section.allowed,
        section.min_interval_s,
        section.watch_s,
        Terms(
            quality_budget=config.policy.quality_budget,
            restart_s=section.takes_s,
            payback_s=section.payback_s,
            least_s=min(section.watch_s, max(30.0, config.long_window_s)),
        ),
        Targets(targets.ttft_s, targets.tbt_s, targets.quantile),
    )
