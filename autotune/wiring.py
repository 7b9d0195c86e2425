"""From a configuration to the parts of a daemon. The only place that knows which class does what."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry

from autotune.actuator import Actuator, Control
from autotune.adapters.control import WatchedEngine
from autotune.adapters.wire import desk_of
from autotune.collector import Collector
from autotune.config import Config, ConfigError
from autotune.decisions import DecisionLog
from autotune.deliberation import Minds
from autotune.journal import Journal
from autotune.journal_file import default_journal
from autotune.metrics import DaemonMetrics
from autotune.parts import Parts, Settings
from autotune.schema import PolicySection
from autotune.ticker import Waiter
from engine.clock import Clock
from engine.paths import default_control_socket
from engine.tunables import TUNABLES, CostClass
from envs.live import LiveEngine
from envs.port import Change
from envs.profile import Profile, ProfileError, read_profile
from envs.reward import Objective, RewardWeights
from envs.signals import Targets
from envs.spaces import Observation
from policies.advisor import advisors
from policies.base import Policy
from policies.guard import Guard, GuardConfig, RateLimit, native_fits
from policies.guards import guard_for
from policies.judgement import JudgeConfig
from policies.predicted_effect import predicted_effect
from policies.predictor_choice import PredictorConfig
from policies.predictor_of import effect_model_of, predictor_of
from policies.rollback import EffectWatch, WatchConfig
from policies.rules import RuleError, RuleSet, load_rules
from policies.stand_in import StandIn
from policies.threshold import ThresholdPolicy
from policies.watch_only import WatchOnly


def check_rules(config: Config) -> RuleSet:
    """The rules that a configuration names. Raises ConfigError with every fault in them."""
    try:
        return load_rules(config.policy.rules)
    except RuleError as error:
        raise ConfigError([f"policy.rules: {problem}" for problem in error.problems]) from error


def policy_of(config: Config, rules: RuleSet, clock: Clock | None = None, *, or_rules: bool = False) -> Policy:
    """Who decides. Raises ConfigError for a profile or a policy that cannot be used.

    ``clock``: holds a learned policy to its time limit; None for no limit. ``or_rules``: in place of a learned policy
    that cannot be used the rules decide (:class:`policies.stand_in.StandIn`); for starts, which must not fail by it.
    """
    section = config.policy
    if config.engine.kind != "autotune":
        return WatchOnly()
    by_rules = ThresholdPolicy(rules)
    if section.use == "auto":
        return _auto(config, by_rules, clock)
    if section.use == "learned" and section.learned is not None:
        return _learned(config, by_rules, clock, or_rules=or_rules)
    if section.use == "rules" or section.profile is None:
        return by_rules
    try:
        return _predictor(config, read_profile(section.profile))
    except (ProfileError, ValueError) as error:
        raise ConfigError([f"policy.profile: {error}"]) from error


def _predictor(config: Config, profile: Profile) -> Policy:
    """Raises ValueError for a pool that is too small for the model."""
    return predictor_of(profile, _targets(config), PredictorConfig(quality_budget=_allowed_loss(config.policy)))


def _learned(config: Config, fallback: Policy, clock: Clock | None, *, or_rules: bool) -> Policy:
    # numpy's reader of weights is not needed by anybody else.
    from policies.card import PolicyFileError  # noqa: PLC0415
    from policies.learned import load_learned  # noqa: PLC0415

    profile = _profile(config)
    advisor = advisors(None if profile is None else partial(_predictor, config, profile))
    digest = None if profile is None else profile.digest
    try:
        return load_learned(
            cast("Path", config.policy.learned), fallback=fallback, advisor=advisor, clock=clock, profile_digest=digest
        )
    except PolicyFileError as error:
        problem = f"policy.learned: {error}"
        if or_rules:
            return StandIn(fallback, problem)
        raise ConfigError([problem]) from error


def _auto(config: Config, rules: Policy, clock: Clock | None) -> Policy:
    from policies.auto import BUNDLED, choose  # noqa: PLC0415

    profile = _profile(config)
    return choose(
        BUNDLED,
        rules,
        profile_digest=None if profile is None else profile.digest,
        quality_budget=_allowed_loss(config.policy),
        clock=clock,
        predictor=lambda: _predictor(config, cast("Profile", profile)),  # not called without a profile
    )


def _allowed_loss(section: PolicySection) -> float:
    """The budget for who has to have one: without any, all may be lost."""
    return 1.0 if section.quality_budget is None else section.quality_budget


def settings_of(config: Config) -> Settings:
    return Settings(
        mode=config.mode,
        poll_s=config.engine.poll_s,
        tick_s=config.tick_s,
        window_s=config.window_s,
        long_s=config.long_window_s,
        stale_after_s=config.engine.stale_after_s,
        timeout_s=config.engine.timeout_s,
        ttft_target_s=config.targets.ttft_s,
        tbt_target_s=config.targets.tbt_s,
    )


def guard_of(config: Config) -> Guard:
    """The guard, which holds any policy to the quality budget, by the profile's figures or by published ones.

    Raises ConfigError for a profile that cannot be read.
    """
    section = config.guard
    limits = {CostClass.STEP: section.rates.step, CostClass.BACKGROUND: section.rates.background}
    return guard_for(
        _profile(config),
        config.policy.quality_budget,
        GuardConfig(
            window_s=config.window_s,
            allowed=section.allowed,
            dwell_s={CostClass.STEP: section.dwell_s.step, CostClass.BACKGROUND: section.dwell_s.background},
            knob_dwell_s=section.knob_dwell_s,
            rates={kind: RateLimit(limit.changes, limit.per_s) for kind, limit in limits.items()},
            retry_s=section.retry_s,
        ),
        native_fits(section.native_fits),
    )


def _profile(config: Config) -> Profile | None:
    try:
        return None if config.policy.profile is None else read_profile(config.policy.profile)
    except ProfileError as error:
        raise ConfigError([f"policy.profile: {error}"]) from error


def minds_of(config: Config, rules: RuleSet, clock: Clock | None = None, *, or_rules: bool = False) -> Minds:
    """Policy (see :func:`policy_of`), guard and effect watch. Raises ConfigError for what cannot be used."""
    return Minds(policy_of(config, rules, clock, or_rules=or_rules), guard_of(config), watch_of(config))


def watch_of(config: Config) -> EffectWatch:
    """Looks after changes; it predicts their effects where the configuration names a profile.

    Raises ConfigError for one that cannot be used.
    """
    section, targets, profile = config.guard.effects, _targets(config), _profile(config)
    settings = WatchConfig(
        JudgeConfig(targets, section.tolerance),
        window_s=config.window_s,
        cool_down_s=section.cool_down_s,
        differs=section.differs,
        canary=section.canary,
        rolls_back=section.rollback,
    )
    if profile is None:
        return EffectWatch(settings)
    try:
        model = effect_model_of(profile, targets)
    except ValueError as error:
        raise ConfigError([f"policy.profile: {error}"]) from error

    def predict(change: Change, observation: Observation) -> tuple[dict[str, float], float] | None:
        effect = predicted_effect(model, change, observation, window_s=config.window_s)
        return None if effect is None else (effect.after, effect.ready_s)

    return EffectWatch(settings, predict)


def _targets(config: Config) -> Targets:
    targets = config.targets
    return Targets(targets.ttft_s, targets.tbt_s, targets.quantile)


def env_of(config: Config, actuator: Actuator, clock: Clock) -> LiveEngine:
    """An environment over the actuator, in which knobs that somebody else owns are held."""
    profile = _profile(config)

    def held() -> Collection[str]:
        return actuator.overrides()

    return LiveEngine(
        actuator,
        targets=_targets(config),
        weights=RewardWeights(Objective(config.objective)),
        quality=None if profile is None else profile.quality_table(),
        short_s=config.window_s,
        long_s=config.long_window_s,
        held=held,
        clock=clock,
    )


def control_socket(config: Config, named: Path | None, environment: Mapping[str, str]) -> Path:
    """Where the engine is: the command line's word, the configuration's, or the default."""
    return named or config.engine.control or default_control_socket(environment)


def build_parts(
    config: Config,
    rules: RuleSet,
    *,
    control: Control,
    clock: Clock,
    waiter: Waiter,
    registry: CollectorRegistry,
    environment: Mapping[str, str],
) -> Parts:
    """Everything that the loop needs. Raises JournalError when the journal is somebody else's or in a bad place, and
    ConfigError for a profile that cannot be used. In place of a learned policy that cannot be, the rules decide.
    """
    watched = control if isinstance(control, WatchedEngine) else None
    latest: Callable[[], Any] = lambda: collector.fresh  # noqa: E731  # the two refer to each other
    actuator = Actuator(control, mode=config.mode, latest=latest, now_ns=clock.now_ns)
    collector = Collector(actuator.poll, clock, long_s=config.long_window_s, stale_after_s=config.engine.stale_after_s)
    return Parts(
        clock=clock,
        waiter=waiter,
        actuator=actuator,
        collector=collector,
        env=env_of(config, actuator, clock),
        minds=minds_of(config, rules, clock, or_rules=True),
        journal=Journal(config.journal.path or default_journal(environment, os.geteuid()), wall_s=clock.wall_s),
        decisions=DecisionLog(),
        metrics=DaemonMetrics(registry, TUNABLES if watched is None else watched.adapter.tunables),
        restarts=None if watched is None else desk_of(config, watched.adapter, clock),
    )
