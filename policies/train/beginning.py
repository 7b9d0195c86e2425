"""Where environments and algorithm are between rollouts: at the beginning of an episode everywhere."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecNormalize

from policies.train.algorithms import Algorithm
from policies.train.vector import raw


def back_to(normalised: VecNormalize, episode: int) -> NDArray[np.float32]:
    """Begin training episode ``episode`` in all environments; their raw observations [environments, entries]."""
    venv = raw(normalised)
    venv.env_method("play", episode)
    return cast("NDArray[np.float32]", venv.reset())


def stand(model: Algorithm, normalised: VecNormalize, vectors: NDArray[np.float32]) -> None:
    """Let the algorithm believe to be there; ``vectors``: raw observations [environments, entries]."""
    model._last_obs = normalised.normalize_obs(vectors)  # noqa: SLF001  # else it would reset once more
    model._last_original_obs = vectors  # noqa: SLF001
    model._last_episode_starts = np.ones(len(vectors), dtype=bool)  # noqa: SLF001
