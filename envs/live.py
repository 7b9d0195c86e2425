"""The live engine as a Gymnasium environment. The class docstring is its specification. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from numpy.typing import NDArray

from engine.clock import Clock, RealClock
from engine.stats import EngineStats
from envs.port import ApplyResult, EnginePort
from envs.reward import QualityTable, RewardWeights, charge_of, literature_quality, reward_terms
from envs.signals import Targets, View
from envs.spaces import (
    Observation,
    action_mask,
    action_space,
    decode_action,
    legal_action,
    observation_space,
    observe,
)
from envs.window import History, StatsWindow


class LiveEngine(gymnasium.Env[NDArray[np.float32], np.int64]):
    """An inference engine that serves real requests while its KV cache is being tuned.

    ## Action space
    ``Discrete(1 + sum of values over TUNABLES)``: 0 changes nothing, every other action sets one knob to one value
    (:func:`envs.spaces.decode_action`). An action that its mask forbids (knob held, unknown, or at that value already)
    counts as nothing.

    ## Observation space
    ``Box(0, 1, float32)``: encoded features, one-hot knobs, and a flag for every unknown feature, as declared in
    :mod:`envs.features` and laid out in :mod:`envs.spaces`. Rates and tails are of a short window (``short_s``),
    lengths and outcomes of a long one (``long_s``), both ending at the last reading.

    ## Starting state
    Whatever the engine is in: ``reset`` reads, **changes no knob**, and forgets earlier readings, so that windows fill
    anew. With the engine out of reach the first observation is all unknown.

    ## Transition
    ``step`` is :meth:`act` (decode, mask, write through the port) followed by :meth:`observe` (read, window, reward).
    It returns at once: **there is no pacing**, the caller's loop ticks, and a daemon calls the two halves around its
    own wait. What the change did shows in later observations. Requests come from outside, so equal seeds do not give
    equal episodes: the environment is **registered nondeterministic**.

    ## Reward
    :func:`envs.reward.reward_terms` over the time since the previous reading: requests inside all targets per second,
    minus violations, quality loss and the price of a change. 0 where nothing is known.

    ## Episode end
    **Never terminates.** ``truncated`` when the engine is lost: it cannot be read, or another instance answers.
    Stepping on afterwards is allowed and starts with empty windows, as after a reset.

    ## Info
    ``proposed`` and ``applied`` (:class:`envs.port.Change` or None: what the action asked for, what is now in force),
    ``result`` (the port's :class:`envs.port.ApplyResult`, None if nothing was written), ``observation``
    (:class:`envs.spaces.Observation`, raw values), ``action_mask`` (int8), ``stats`` (the reading, None if lost),
    ``reward_terms``, ``charge`` (:class:`envs.reward.Charge`: tokens generated since the last reading and their loss).

    ## Arguments
    ``port`` is the only way to the engine. ``held`` names the knobs that may not be moved now (an operator's, or
    dwelling ones); it is asked at every observation. ``clock`` stamps observations.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as the base class declares it

    def __init__(
        self,
        port: EnginePort,
        *,
        targets: Targets | None = None,
        weights: RewardWeights | None = None,
        quality: QualityTable | None = None,
        short_s: float = 10.0,
        long_s: float = 60.0,
        held: Callable[[], Collection[str]] = tuple,
        clock: Clock | None = None,
    ) -> None:
        if not 0 < short_s <= long_s:
            raise ValueError(f"windows need 0 < short_s <= long_s, got {short_s} and {long_s}")
        self.observation_space = observation_space()
        self.action_space = action_space()
        self._port, self._held = port, held
        self._targets = targets or Targets()
        self._weights = weights or RewardWeights()
        self._quality = quality or literature_quality()
        self._short_s, self._long_s = short_s, long_s
        self._clock = clock or RealClock()
        self._history = History(long_s)
        self._last: EngineStats | None = None
        self._proposed: Any = None
        self._result: ApplyResult | None = None
        self.observation = self._observation()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Forget what was read and read once. Neither ``seed`` nor ``options`` matters to a live engine."""
        super().reset(seed=seed, options=options)
        self._history.lose()
        self._last = None
        self._proposed, self._result = None, None
        vector, _, _, _, info = self.observe()
        return vector, info

    def step(self, action: np.int64 | int) -> tuple[NDArray[np.float32], SupportsFloat, bool, bool, dict[str, Any]]:
        """:meth:`act`, then :meth:`observe`."""
        self.act(action)
        return self.observe()

    def act(self, action: np.int64 | int) -> ApplyResult | None:
        """Write what an action asks for; None when that is nothing. Raises ValueError for one outside the space."""
        self._proposed = decode_action(int(action))
        change = decode_action(legal_action(int(action), self.action_masks()))
        self._result = None if change is None else self._port.apply(change)
        return self._result

    def observe(self) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Read the engine: what :meth:`step` returns, about the action written since the last call, if any."""
        stats = self._port.read()
        lost = stats is None or (self._last is not None and stats.instance != self._last.instance)
        if stats is None:
            self._history.lose()
        else:
            self._history.add(stats)
        self.observation = self._observation()
        result, proposed = self._result, self._proposed
        applied = result.change if result is not None and result.took_effect else None
        interval = StatsWindow.between(self._last, stats)
        terms = reward_terms(interval, self._targets, self._quality, self._weights, applied)
        self._last, self._result, self._proposed = stats, None, None
        info = {
            "proposed": proposed,
            "applied": applied,
            "result": result,
            "observation": self.observation,
            "action_mask": self.action_masks(),
            "stats": stats,
            "reward_terms": terms,
            "charge": charge_of(interval, self._quality),
        }
        return self.observation.vector(), terms.total, False, lost, info

    def action_masks(self) -> NDArray[np.int8]:
        """1 for every action that would change something now, and for nothing: int8 [actions]."""
        return action_mask(self.observation.tunables, {*self.observation.held, *self._out_of_reach()})

    def _out_of_reach(self) -> tuple[str, ...]:
        """Knobs that this engine refuses to move, whoever asks."""
        has_host = self._last is None or self._last.gauges.host_pool_bytes
        return () if has_host else ("host_offload",)

    def _observation(self) -> Observation:
        history = self._history
        view = View(history.window(self._short_s), history.window(self._long_s), self._targets, history.since_change_s)
        return observe(view, stamp_ns=self._clock.now_ns(), observed_s=history.observed_s, held=self._held())
