"""The simulated engine as a Gymnasium environment. The class docstring is its specification. No torch."""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from engine.transfers import HostLink
from engine.tunables import TunableValue, parse_change
from envs.arrivals_feed import Feed, StreamFeed, TraceFeed
from envs.latency_model import LatencyModel
from envs.ledger import Ledger, TrueFigures
from envs.live import LiveEngine
from envs.profile import Profile, read_profile
from envs.randomise import Draw, Randomisation
from envs.reward import QualityTable, RewardWeights, literature_quality
from envs.signals import Targets
from envs.sim_port import SimPort
from envs.simulator import SimOptions, Simulator
from envs.spaces import action_space, observation_space
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import Workload, stream
from envs.workload.scaling import Scaling, scale
from envs.workload.trace import Trace

DEFAULT_PROFILE: Final = Path(__file__).parent / "profiles" / "llama3_8b_l4_estimated.yaml"
DEFAULT_TARGETS: Final = Targets(ttft_s=2.0, tbt_s=0.25)
_SHOWN: Final = 300  # control intervals that a picture shows
_Step = tuple[NDArray[np.float32], SupportsFloat, bool, bool, dict[str, Any]]


@dataclass(frozen=True)
class Foreseen:
    """What an action would come to: the figures of the time that followed, and requests that wait at its end."""

    figures: TrueFigures
    waiting: int


class SimulatedEngine(gymnasium.Env[NDArray[np.float32], np.int64]):
    """An inference engine under generated or recorded load, simulated by its own scheduler and cache.

    ## Action space
    ``Discrete(1 + sum of values over TUNABLES)``, as :class:`envs.live.LiveEngine`: 0 changes nothing, every other
    action sets one knob to one value. An action that its mask forbids counts as nothing. A change takes effect at the
    first step boundary after ``actuation_delay_s``.

    ## Observation space
    ``Box(0, 1, float32)``, encoded by the same code as the live environment's from the same readings: features, one-hot
    knobs, a flag for every unknown feature. Readings are ``metric_lag_s`` old. A fresh array at every step.

    ## Starting state
    ``reset`` builds a new engine with ``values`` in force, draws this episode's world (see ``randomise``) and workload,
    and serves for ``warm_up_s`` seconds, so that windows have something in them. Everything random comes from the
    environment's generator: after ``reset(seed=...)`` all that follows, later resets included, is the same in any
    process. ``options``: ``{"workload": name or Trace}`` replaces the workload for this and later episodes.

    ## Transition
    ``step`` writes the action, lets ``interval_s`` seconds pass (to the first step boundary after), and reads.

    ## Reward
    :func:`envs.reward.reward_terms`, as live: requests inside all targets per second, minus violations, quality loss
    and the price of a change, as far as readings tell.

    ## Episode end
    **Never terminates or truncates by itself**; ``gymnasium.make`` adds a limit of 300 steps. A trace that ends is
    repeated (unless ``repeats`` is off), a generated workload goes on for ``episode_s``; after that nothing arrives.

    ## Info
    As live (``proposed``, ``applied``, ``result``, ``observation``, ``action_mask``, ``stats``, ``reward_terms``), and
    ``true``, figures of the interval that a live engine cannot know exactly: ``offered``, ``completed``, ``good``
    (inside all targets, request by request), ``violations``, ``goodput_rps``, ``ttft_tail_s``, ``tbt_tail_s``,
    ``quality_per_token`` (relative loss charged per generated token), ``tokens``; ``world`` (what was drawn).

    ## Arguments
    ``profile``: a document, its path, or None for an estimated Llama 3 8B on an L4, whose memory is soon full.
    ``workload``: a name of the catalogue, a :class:`envs.workload.generators.Workload`, or a Trace. ``rate_scale``
    multiplies its rate; 0.2 brings the default workload to what the default profile can and cannot serve in turns.
    ``pool_bytes``: of KV (None: the profile's). ``targets``: 2 s to the first token and 0.25 s between tokens.
    ``values``: knobs at the start. ``held``: knobs that may not be moved. ``host_pool_bytes``: of a host tier behind
    ``host_link``, the profile's unless given; without one ``host_offload`` cannot be moved. ``options``: further fields
    of :class:`envs.simulator.SimOptions`. ``prefix_cache``: None follows the workload: on if its requests share
    prefixes.

    ## Version history
    v0: first.
    """

    metadata: dict[str, Any] = {"render_modes": ["human", "rgb_array"], "render_fps": 4}  # noqa: RUF012  # as its base

    def __init__(
        self,
        profile: Profile | str | Path | None = None,
        workload: str | Workload | Trace = "chat-bursty",
        *,
        rate_scale: float = 0.2,
        pool_bytes: int | None = None,
        interval_s: float = 2.0,
        episode_s: float = 620.0,
        repeats: bool = True,
        warm_up_s: float = 10.0,
        values: Mapping[str, TunableValue] | None = None,
        held: Collection[str] = (),
        randomise: Randomisation | None = None,
        actuation_delay_s: float = 0.0,
        metric_lag_s: float = 0.0,
        prefix_cache: bool | None = None,
        host_pool_bytes: int = 0,
        host_link: HostLink | None = None,
        options: Mapping[str, Any] | None = None,
        targets: Targets | None = None,
        weights: RewardWeights | None = None,
        quality: QualityTable | None = None,
        short_s: float = 10.0,
        long_s: float = 60.0,
        render_mode: str | None = None,
    ) -> None:
        """Raises ValueError for arguments out of range, EngineError for a profile that cannot be read."""
        if (
            not all(0 < value < math.inf for value in (interval_s, episode_s, rate_scale))
            or not 0 <= warm_up_s < math.inf
        ):
            raise ValueError(
                "interval_s, episode_s and rate_scale must be > 0 and warm_up_s >= 0, and all of them finite"
            )
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode {render_mode!r}: choose one of {', '.join(self.metadata['render_modes'])}")
        self.observation_space = observation_space()
        self.action_space = action_space()
        self.render_mode = render_mode
        self.profile = profile if isinstance(profile, Profile) else read_profile(Path(profile or DEFAULT_PROFILE))
        self._model: LatencyModel = self.profile.latency_model()
        self._pool_bytes = pool_bytes or self.profile.pool_bytes
        self._workload = _named(workload)
        self._rate_scale = rate_scale
        self._interval_ns, self._warm_up_ns = round(1e9 * interval_s), round(1e9 * warm_up_s)
        self._episode_s, self._repeats = episode_s, repeats
        self._values = {name: parse_change(name, value) for name, value in (values or {}).items()}
        self._held = tuple(held)
        self._randomise = randomise or Randomisation()
        self._delay_s, self._lag_s = actuation_delay_s, metric_lag_s
        self._prefix_cache = prefix_cache
        self._host_pool_bytes, self._host_link = host_pool_bytes, host_link or self.profile.host_link()
        if host_pool_bytes and self._host_link is None:
            raise ValueError("a host pool needs a link, and the profile knows of none: give host_link")
        self._options = dict(options or {})
        self._targets = targets or DEFAULT_TARGETS
        self._weights = weights or RewardWeights()
        self._quality = quality or self.profile.quality_table() or literature_quality()
        self._windows = (short_s, long_s)
        self._ticks = 0
        self._live: LiveEngine | None = None
        self._port: SimPort | None = None
        self._world: Draw | None = None
        self.last_figures = TrueFigures()  # of the last interval, whole
        self._rows: deque[dict[str, Any]] = deque(maxlen=_SHOWN)

    # -- the Gymnasium interface ----------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        if options and "workload" in options:
            self._workload = _named(options["workload"])
        self._world = world = self._randomise.draw(self.np_random)
        self._port = SimPort(self._new_simulator(world), metric_lag_s=self._lag_s + world.metric_lag_s)
        self._live = LiveEngine(
            self._port,
            targets=self._targets,
            weights=self._weights,
            quality=self._quality,
            short_s=self._windows[0],
            long_s=self._windows[1],
            held=_Held(self._held),
            clock=self._port.simulator.clock,
        )
        self._ticks = 0
        self._rows.clear()
        vector, info = self._live.reset()
        # The windows see the warm-up: whoever acts first has something to go by.
        while self._port.simulator.now_ns < self._warm_up_ns:
            self._port.advance(min(self._warm_up_ns, self._port.simulator.now_ns + self._interval_ns))
            vector, _, _, _, info = self._live.observe()
        self._start_ns = max(self._warm_up_ns, 0)
        return vector, self._finish(info)

    def step(self, action: np.int64 | int) -> _Step:
        live, port = self._running()
        live.act(action)
        self._ticks += 1
        port.advance(self._start_ns + self._ticks * self._interval_ns)
        vector, reward, terminated, truncated, info = live.observe()
        info = self._finish(info)
        if self.render_mode == "human":
            self.render()
        return vector, reward, terminated, truncated, info

    def action_masks(self) -> NDArray[np.int8]:
        """1 for every action that would change something now, and for nothing: int8 [actions]."""
        return self._running()[0].action_masks()

    def render(self) -> Any:
        """``human``: prints a line and returns None. ``rgb_array``: uint8 [height, width, 3], needs matplotlib."""
        if self.render_mode is None or not self._rows:
            return None
        if self.render_mode == "human":
            print(_line(self._rows[-1]), flush=True)  # noqa: T201  # what rendering for people is
            return None
        try:
            from envs.picture import picture  # noqa: PLC0415  # an optional dependency
        except ImportError as error:
            raise DependencyNotInstalled("rgb_array needs matplotlib: pip install 'kv-autotune[plots]'") from error
        return picture(list(self._rows), self._targets)

    def close(self) -> None:
        self._live = self._port = None

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def simulator(self) -> Simulator:
        """This episode's engine. Raises gymnasium's ResetNeeded before the first reset."""
        return self._running()[1].simulator

    def snapshot(self) -> bytes:
        """The whole state, to come back to with :meth:`restore`: for policies that look ahead."""
        state = {
            "live": self._live,
            "port": self._port,
            "ticks": self._ticks,
            "random": self.np_random,
            "rows": self._rows,
            "world": self._world,
            "figures": self.last_figures,
        }
        return pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)

    def restore(self, snapshot: bytes) -> None:
        """Back to a snapshot of this environment, which stays reusable."""
        state = pickle.loads(snapshot)  # noqa: S301  # made by snapshot() in this process
        self._live, self._port, self._ticks = state["live"], state["port"], state["ticks"]
        self._np_random, self._rows = state["random"], state["rows"]
        self._world, self.last_figures = state["world"], state["figures"]

    def foresee(self, actions: Sequence[int], horizon_s: float) -> list[Foreseen]:
        """Try every action on a copy of the engine and let ``horizon_s`` pass in which nothing else is done.

        What arrives, and all that is drawn, is the same for all of them, and what will really come. The environment
        stays where it is, also where this fails. Raises ValueError for a horizon that is not > 0 and finite.
        """
        if not 0 < horizon_s < math.inf:
            raise ValueError(f"a horizon must be > 0 s and finite, got {horizon_s:g}")
        self._running()
        here, found = self.snapshot(), list[Foreseen]()
        for action in actions:
            try:
                live, port = self._running()
                live.act(action)
                simulator = port.simulator
                simulator.run_until(simulator.now_ns + round(1e9 * horizon_s))
                found.append(Foreseen(simulator.ledger.take(), simulator.stats().gauges.waiting))
            finally:
                self.restore(here)
        return found

    def _running(self) -> tuple[LiveEngine, SimPort]:
        if self._live is None or self._port is None:
            raise gymnasium.error.ResetNeeded("call reset() first")
        return self._live, self._port

    def _new_simulator(self, world: Draw) -> Simulator:
        feed, shares = self._feed(world)
        options = SimOptions(
            **{
                "pool_bytes": round(self._pool_bytes * world.pool),
                "max_model_len": self.profile.model.max_model_len,
                "prefix_cache": shares if self._prefix_cache is None else self._prefix_cache,
                "bandwidth_bytes_per_s": self.profile.device.bandwidth_bytes_per_s,
                "model_name": self.profile.model.name,
                "host_pool_bytes": self._host_pool_bytes,
                "host_link": self._host_link if self._host_pool_bytes else None,
                **self._options,
                "values": self._values,
                "actuation_delay_s": self._delay_s + world.actuation_delay_s,
                "jitter": world.jitter,
            }
        )
        groups = self.profile.groups()
        ledger = Ledger(self._targets)
        return Simulator(groups, world.model(self._model), options, feed, ledger=ledger, quality=self._quality)

    def _feed(self, world: Draw) -> tuple[Feed, bool]:
        """This episode's arrivals, and whether its requests share prefixes."""
        if isinstance(self._workload, Trace):
            scaling = Scaling(length_scale=1 / world.prompts, time_scale=1 / (self._rate_scale * world.rate))
            trace = scale(self._workload, scaling)
            return TraceFeed(trace, repeats=self._repeats), trace.block_tokens > 0
        workload = world.workload(self._workload)
        make = partial(
            stream,
            workload,
            duration_s=self._episode_s,
            seed=world.workload_seed,
            rate_scale=self._rate_scale * world.rate,
        )
        block_tokens = max(regime.block_tokens for regime in workload.regimes)
        return StreamFeed(make, block_tokens=block_tokens), block_tokens > 0

    def _finish(self, info: dict[str, Any]) -> dict[str, Any]:
        port = self._running()[1]
        self.last_figures = port.simulator.ledger.take()
        info["true"] = true_figures(self.last_figures, self._targets, self._interval_ns / 1e9)
        info["world"] = self._world
        if self.render_mode is not None:
            self._rows.append(_row(port.simulator.now_ns, info))
        return info


def true_figures(figures: TrueFigures, targets: Targets, interval_s: float) -> dict[str, float | None]:
    """``info["true"]``: see :class:`SimulatedEngine`."""
    return {
        "offered": figures.offered,
        "completed": figures.completed,
        "good": figures.good,
        "violations": figures.violations,
        "goodput_rps": figures.good / interval_s,
        "ttft_tail_s": figures.ttft_quantile_s(targets.quantile),
        "tbt_tail_s": figures.tbt_quantile_s(targets.quantile),
        "quality_per_token": figures.quality_per_token,
        "tokens": figures.tokens,
    }


class _Held:
    """A constant that can be pickled."""

    def __init__(self, knobs: tuple[str, ...]) -> None:
        self._knobs = knobs

    def __call__(self) -> tuple[str, ...]:
        return self._knobs


def _named(workload: str | Workload | Trace) -> Workload | Trace:
    if not isinstance(workload, str):
        return workload
    if workload not in CATALOGUE:
        raise ValueError(f"workload {workload!r} is not known; choose one of {', '.join(CATALOGUE)}")
    return CATALOGUE[workload]


def _row(now_ns: int, info: Mapping[str, Any]) -> dict[str, Any]:
    """What a picture needs of one interval."""
    stats = info["stats"]
    resident: dict[str, int] = {}
    for row in stats.gauges.resident:
        resident[row.kv_format] = resident.get(row.kv_format, 0) + row.bytes
    return {
        "at_s": now_ns / 1e9,
        "load": stats.load,
        "running": stats.gauges.running,
        "waiting": stats.gauges.waiting,
        "pool_bytes": stats.gauges.kv_pool_bytes,
        "resident": resident,
        "applied": None if info["applied"] is None else str(info["applied"]),
        "reward": info["reward_terms"].total,
        **info["true"],
    }


def _line(row: Mapping[str, Any]) -> str:
    ttft, tbt = (("-" if row[name] is None else f"{1e3 * row[name]:.0f} ms") for name in ("ttft_tail_s", "tbt_tail_s"))
    filled = round(20 * row["load"])
    return (
        f"{row['at_s']:8.1f} s |{'#' * filled}{' ' * (20 - filled)}| load {row['load']:.2f}  "
        f"running {row['running']:3d}  waiting {row['waiting']:3d}  TTFT {ttft}  TBT {tbt}  "
        f"good {row['goodput_rps']:.1f}/s  reward {row['reward']:+.2f}  {row['applied'] or ''}"
    ).rstrip()
