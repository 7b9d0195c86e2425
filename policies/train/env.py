"""What a policy is trained in: the simulated engine behind the daemon's guard, one planned episode after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, SupportsFloat

import gymnasium
import numpy as np
from numpy.typing import NDArray

from envs.profile import Profile
from envs.reward import Charge, Objective, RewardWeights
from envs.signals import Targets
from envs.simulated import SimulatedEngine
from envs.spaces import (
    NOTHING,
    Observation,
    action_space,
    decode_action,
    encode_action,
    legal_action,
    observation_space,
)
from policies.advice_input import advised_actions, advised_names, with_advice
from policies.base import PolicyState
from policies.guard import Guard, GuardContext, native_fits
from policies.guarded import guarded_mask
from policies.guards import guard_for
from policies.train.ahead import horizon_s, worth
from policies.train.lookahead import Student, Studied, study
from policies.train.recipe import Lookahead, Recipe
from policies.train.simulation import engine_of
from policies.train.tally import REWARD_SCALE, Tally
from policies.train.teacher import teacher_for
from policies.train.traffic import Episode, Traffic

# What a step moves on, besides the engine.
_MOVES: Final = (
    "_guard_state", "_mask_state", "_advisor_state", "_advised", "_charge", "_mask", "observation",
)  # fmt: skip
APART_FROM: Final = 1 << 20  # streams, far from those of training
_Step = tuple[NDArray[np.float32], SupportsFloat, bool, bool, dict[str, Any]]


class TrainingEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """The simulated engine for training and for held-out scores.

    ## Action and observation space
    Those of :class:`envs.simulated.SimulatedEngine`, with what the teacher would do behind the observation where the
    recipe says ``advised``. An action goes through the guard that the daemon has; one that the
    mask forbids, or that the guard refuses, counts as nothing; a format is gone to as far as the quality budget bears,
    and with the budget overdrawn the guard hands a knob back whatever the action. :meth:`action_masks` knows the guard:
    it has exactly what would be let through, but for the quality budget, of which the exported policy's mask does not
    know either.

    ## Starting state
    ``reset`` begins the next episode of its plan (:mod:`policies.train.traffic`): traffic, world and the knobs at the
    start. A ``seed`` given to it changes nothing: the recipe's seed, the stream and the number decide what comes.

    ## Reward
    The exact figures of the interval, which only a simulator has: requests inside all targets per second, less
    violations and the price of a change (the weights of :class:`envs.reward.RewardWeights`), over the source's mean
    rate, so that sources of different rates count alike. Less the loss of quality at :meth:`set_price`: generating
    tokens at the source's mean rate and at the whole budget costs the price. Clipped and scaled:
    :mod:`policies.train.tally`.
    Under ``batch``, gain and violations are those of the environment's own reward.

    ## Episode end
    Truncated after ``episode_steps``; never terminated.

    ## Info
    ``applied``, ``true`` as the simulated engine's; ``outcome`` at the end of an episode
    (:meth:`policies.train.tally.Tally.outcome`).
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as the base class declares it

    def __init__(
        self, recipe: Recipe, profile: Profile, traffic: Traffic, stream: int, first: int = 0, *, index: int = 0
    ) -> None:
        """``stream``: of a group's common traffic; ``index``: the environment's own, for what it plays apart."""
        self._advisor = None
        self._advisor_state: PolicyState | None = None
        self._advised = NOTHING
        self.observation_space, self.action_space = observation_space(), action_space()
        if recipe.advised and recipe.warm_start is not None:
            self._advisor = teacher_for(recipe.warm_start.teacher, profile)
            entries = len(advised_names())
            self.observation_space = gymnasium.spaces.Box(0.0, 1.0, shape=(entries,), dtype=np.float32)
        self._recipe, self._profile, self._traffic = recipe, profile, traffic
        self._stream, self._next, self._stride, self._is_held_out = stream, first, 1, False
        self._home, self._index = stream, index
        self._weights = RewardWeights(recipe.objective)
        # The mask is that of the guard that the exported policy carries: it knows neither losses nor what was refused
        # for them, and counts what it let through as made.
        self._mask_guard = Guard(recipe.guard_config(), native_fits())
        self._mask_state = self._mask_guard.initial_state()
        self._guard = guard_for(profile, recipe.quality_budget, recipe.guard_config())
        self._charge = Charge()
        self._guard_state = self._guard.initial_state()
        self._engine: SimulatedEngine | None = None
        self._episode: Episode | None = None
        self._price = recipe.price
        self._mask = np.zeros(int(self.action_space.n), dtype=np.int8)
        self._tally: Tally | None = None
        self.observation: Observation | None = None

    def play(self, number: int) -> None:
        """The next reset begins training episode ``number``."""
        self._stream, self._next, self._stride, self._is_held_out = self._home, number, 1, False

    def play_apart(self, number: int) -> None:
        """The next reset begins episode ``number`` of a stream of this environment's own, unknown to training."""
        self._stream, self._next, self._stride, self._is_held_out = APART_FROM + self._index, number, 1, False

    def play_held_out(self, number: int, stride: int) -> None:
        """The next resets begin held-out episodes ``number``, ``number + stride``, ..."""
        self._next, self._stride, self._is_held_out = number, stride, True

    def set_price(self, price: float) -> None:
        """Of quality; see Reward."""
        self._price = price

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        number, self._next = self._next, self._next + self._stride
        held_out = self._is_held_out
        self._episode = plan = (
            self._traffic.held_out(number) if held_out else self._traffic.training(self._stream, number)
        )
        recipe = self._recipe
        self._engine = engine_of(plan, recipe, self._profile, self._weights)
        vector, info = self._engine.reset(seed=plan.world_seed)
        self._guard_state, self._mask_state = self._guard.initial_state(), self._mask_guard.initial_state()
        self._tally = Tally(plan, self._weights, recipe.interval_s, recipe.quality_budget)
        self._charge, self._advisor_state = info["charge"], None
        return self._look(info["observation"], vector), {}

    def step(self, action: np.int64 | int) -> _Step:
        engine, observation = self._running()
        change = decode_action(legal_action(int(action), self._mask))
        _, self._mask_state = self._mask_guard.check(change, GuardContext(observation), self._mask_state)
        context = GuardContext(observation, charge=self._charge)
        verdict, self._guard_state = self._guard.check(change, context, self._guard_state)
        allowed = NOTHING if verdict.change is None else encode_action(verdict.change)
        vector, _, _, _, info = engine.step(allowed)
        self._charge = info["charge"]
        vector = self._look(info["observation"], vector)
        tally = self._counted()
        reward = tally.add(info, self._price)
        is_over = tally.steps >= self._recipe.episode_steps
        told = {"applied": info["applied"], "true": info["true"]}
        if is_over:
            told["outcome"] = tally.outcome()
        return vector, reward, False, is_over, told

    def action_masks(self) -> NDArray[np.int8]:
        """1 for nothing and for what the guard would let through now: int8 [actions]."""
        return self._mask

    def advice(self) -> int:
        """The action that the teacher advises now, as far as the mask allows it; nothing without advice."""
        return self._advised

    def look(self) -> tuple[Observation | None, NDArray[np.int8], Targets | None]:
        """The observation as policies take it, the mask, and the targets of the episode."""
        return self.observation, self._mask, None if self._episode is None else self._episode.targets

    def study(self, number: int, student: Student, plan: Lookahead) -> Studied:
        """Play episode ``number`` apart and try actions on the way: :func:`policies.train.lookahead.study`."""
        return study(self, number, student, plan, np.random.default_rng([self._recipe.seed, 2, self._index, number]))

    def horizon_s(self, plan: Lookahead) -> float:
        """For how long an action of this episode is left alone: see the plan."""
        return horizon_s(self._planned(), plan, self._recipe.interval_s)

    def worths(self, actions: Sequence[int], plan: Lookahead) -> NDArray[np.float64]:
        """What each action would be worth now over :meth:`horizon_s`, in shares of what the mean rate brings in that
        time: the service's reward, less the price of quality and of changes. float64 [actions].

        After the action nothing else is done, or what the teacher advises: ``plan.then``.
        """
        if plan.then == "advice":
            return self._followed(actions, plan)
        engine, _ = self._running()
        episode, left_s = self._planned(), self.horizon_s(plan)
        tried = zip(actions, engine.foresee(actions, left_s), strict=True)
        rest = self._weights, self._price, self._recipe, left_s
        return np.array([worth(action, ahead, episode, *rest) for action, ahead in tried])

    def _followed(self, actions: Sequence[int], plan: Lookahead) -> NDArray[np.float64]:
        """The mean reward of the intervals in which an action and then the teacher's advice is followed."""
        engine, _ = self._running()
        here, place = engine.snapshot(), {name: getattr(self, name) for name in _MOVES}
        tally = self._counted().copy()
        interval_s, found = self._recipe.interval_s, []
        for action in actions:
            try:
                total, number = float(self.step(action)[1]), 1
                while number * interval_s < self.horizon_s(plan):
                    total, number = total + float(self.step(self._advised)[1]), number + 1
                total /= REWARD_SCALE
                if self._weights.objective is Objective.INTERACTIVE:  # who still waits then will hardly be in time
                    waiting = engine.simulator.stats().gauges.waiting
                    total -= self._weights.violation * waiting / self._planned().mean_rps / interval_s
                found.append(total / number)
            finally:
                engine.restore(here)
                vars(self).update(place)
                self._tally = tally.copy()
        return np.array(found)

    def outcome(self) -> dict[str, Any]:
        """Of the episode so far."""
        return self._counted().outcome()

    def _running(self) -> tuple[SimulatedEngine, Observation]:
        if self._engine is None or self.observation is None:
            raise gymnasium.error.ResetNeeded("call reset() first")
        return self._engine, self.observation

    def _counted(self) -> Tally:
        if self._tally is None:
            raise gymnasium.error.ResetNeeded("call reset() first")
        return self._tally

    def _planned(self) -> Episode:
        if self._episode is None:
            raise gymnasium.error.ResetNeeded("call reset() first")
        return self._episode

    def _look(self, observation: Observation, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take it in. Returns what the network gets."""
        self.observation = observation
        self._mask = guarded_mask(self._mask_guard, GuardContext(observation), self._mask_state)
        if self._advisor is None:
            return vector
        advisor = self._advisor.policy(self._planned().targets)
        state = advisor.initial_state() if self._advisor_state is None else self._advisor_state
        decision, self._advisor_state = advisor.decide(observation, state)
        vector = with_advice(vector, decision.change, self._mask)
        self._advised = int(advised_actions(vector[None])[0])
        return vector
