"""A run to go on with: weights, optimiser, statistics, random generators, counters. No pickles are read."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from pydantic import TypeAdapter
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from engine.json_text import load_json
from engine.text import one_line
from policies.card import Normaliser, PolicyFileError
from policies.train.algorithms import Algorithm
from policies.train.archive import OPTIMIZER, POLICY, read_states
from policies.train.arrays import read_arrays
from policies.train.vector import CLIP, EPSILON
from policies.training_range import RangeRecorder

MODEL: Final = "model.zip"
STATE: Final = "state.json"
ARRAYS: Final = "arrays.npz"
BUFFER: Final = "buffer.npz"
OLD: Final = ".old"
MAX_STATE_BYTES: Final = 1 << 20
_BUFFER_ARRAYS: Final = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


@dataclass
class Progress:
    """Where a run is. ``rows`` of metrics are written; ``rounds`` of looking ahead and ``tried`` actions in them,
    ``looked`` when they are over; ``episode``: the next one of every stream; ``waited``: judgements without a better
    score; ``price``: of quality.
    """

    rows: int = 0
    rounds: int = 0
    tried: int = 0
    looked: bool = False
    episode: int = 0
    steps: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_steps: int = 0
    waited: int = 0
    stopped: str = ""
    price: float = 0.0
    baselines: dict[str, float] = field(default_factory=dict)


def save(folder: Path, model: Algorithm, normalised: VecNormalize, seen: RangeRecorder, progress: Progress) -> None:
    """Write a checkpoint; an earlier one of this name is replaced, and :func:`put_back` finds it or the new one whole
    wherever this was interrupted. Raises OSError.
    """
    made = folder.with_name(folder.name + ".new")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    model.save(made / MODEL)
    statistics = cast("RunningMeanStd", normalised.obs_rms)
    mersenne = cast("tuple[str, Any, int, int, float]", np.random.get_state())  # noqa: NPY002  # what SB3 draws from
    numbers = random.getstate()
    np.savez(
        made / ARRAYS,
        mean=statistics.mean, var=statistics.var, low=seen.low, high=seen.high, unknown=seen.unknown,
        torch=torch.get_rng_state().numpy(), numpy=mersenne[1], python=np.array(numbers[1], dtype=np.uint64),
    )  # fmt: skip
    if isinstance(model, DQN) and model.replay_buffer is not None:
        buffer = model.replay_buffer
        rows = buffer.buffer_size if buffer.full else buffer.pos
        np.savez(made / BUFFER, **{name: getattr(buffer, name)[:rows] for name in _BUFFER_ARRAYS})
    state = {
        "progress": vars(progress),
        "counters": {
            "num_timesteps": model.num_timesteps,
            "updates": model._n_updates,  # noqa: SLF001  # SB3 restores it by name as well
            "episodes": model._episode_num,  # noqa: SLF001
        },
        "normaliser_count": float(statistics.count),
        "numpy": list(mersenne[2:]),
        "python_gauss": numbers[2],
        "actions": model.action_space.np_random.bit_generator.state,
        "buffer": None if not isinstance(model, DQN) else _place(model),
    }
    (made / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    old = folder.with_name(folder.name + OLD)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def put_back(folder: Path) -> None:
    """The earlier checkpoint again, where a process ended between taking it away and putting the new one there."""
    old = folder.with_name(folder.name + OLD)
    if old.is_dir() and not folder.exists():
        old.rename(folder)


def load(folder: Path, model: Algorithm, normalised: VecNormalize, seen: RangeRecorder) -> Progress:
    """Bring a freshly built model to where a checkpoint was. Raises PolicyFileError for one that does not fit."""
    states = read_states(folder / MODEL, (POLICY, OPTIMIZER))
    state, arrays = _state(folder), read_arrays(folder / ARRAYS)
    try:
        model.policy.load_state_dict(states[POLICY])
        model.policy.optimizer.load_state_dict(states[OPTIMIZER])
        statistics = cast("RunningMeanStd", normalised.obs_rms)
        statistics.mean, statistics.var = arrays["mean"], arrays["var"]
        statistics.count = float(state["normaliser_count"])
        seen.low, seen.high, seen.unknown = arrays["low"], arrays["high"], arrays["unknown"]
        counters = state["counters"]
        model.num_timesteps = int(counters["num_timesteps"])
        model._n_updates = int(counters["updates"])  # noqa: SLF001
        model._episode_num = int(counters["episodes"])  # noqa: SLF001
        torch.set_rng_state(torch.as_tensor(arrays["torch"]))
        position, has_gauss, gauss = state["numpy"]
        np.random.set_state(("MT19937", arrays["numpy"], int(position), int(has_gauss), float(gauss)))  # noqa: NPY002
        random.setstate((3, tuple(int(word) for word in arrays["python"]), state["python_gauss"]))
        model.action_space.np_random.bit_generator.state = state["actions"]
        if isinstance(model, DQN):
            _refill(model, read_arrays(folder / BUFFER), state["buffer"])
        return _progress(state["progress"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise PolicyFileError(f"{folder}: the checkpoint does not fit this run: {one_line(error, 200)}") from error


def statistics_of(folder: Path) -> tuple[Normaliser, RangeRecorder, Progress]:
    """What an export needs besides the weights. Raises PolicyFileError."""
    arrays, state, seen = read_arrays(folder / ARRAYS), _state(folder), RangeRecorder()
    try:
        seen.low, seen.high, seen.unknown = arrays["low"], arrays["high"], arrays["unknown"]
        normaliser = Normaliser(mean=arrays["mean"].tolist(), var=arrays["var"].tolist(), epsilon=EPSILON, clip=CLIP)
        return normaliser, seen, _progress(state["progress"])
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyFileError(f"{folder}: the checkpoint lacks statistics: {one_line(error, 200)}") from error


def _progress(data: Any) -> Progress:
    """Raises ValueError for values of other kinds than they are declared to be, and for others beside them."""
    progress = TypeAdapter(Progress).validate_python(data)
    if unknown := set(data) - set(vars(progress)):
        raise ValueError(f"{', '.join(sorted(unknown))} is nothing that a run counts")
    return progress


def _state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise PolicyFileError(f"{path}: larger than a state can be")
        state = load_json(path.read_bytes())
    except OSError as error:
        raise PolicyFileError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PolicyFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(state, dict):
        raise PolicyFileError(f"{path}: no state of a run")
    return state


def _place(model: DQN) -> dict[str, Any]:
    buffer = cast("ReplayBuffer", model.replay_buffer)
    return {"pos": buffer.pos, "full": buffer.full, "calls": model._n_calls}  # noqa: SLF001  # when targets follow


def _refill(model: DQN, arrays: dict[str, np.ndarray[Any, Any]], place: dict[str, Any]) -> None:
    buffer = cast("ReplayBuffer", model.replay_buffer)
    for name in _BUFFER_ARRAYS:
        rows = arrays[name]
        getattr(buffer, name)[: len(rows)] = rows
    buffer.pos, buffer.full = int(place["pos"]), bool(place["full"])
    model._n_calls = int(place["calls"])  # noqa: SLF001
