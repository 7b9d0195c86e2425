"""The guard as a mask: what an action may ask for so that the guard lets it through. For training and after alike."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.port import Change
from envs.spaces import NOTHING, all_changes
from policies.guard import Guard, GuardContext, GuardState

_ACTIONS: Final[Mapping[Change, int]] = MappingProxyType({change: i for i, change in enumerate(all_changes(), 1)})


def guarded_mask(guard: Guard, context: GuardContext, state: GuardState) -> NDArray[np.int8]:
    """1 for nothing and for every change that the guard would let through now: int8 [actions].

    Knobs that the observation holds are masked, too; the guard itself knows nothing of them.
    """
    held, mask = context.observation.held, np.zeros(1 + len(_ACTIONS), dtype=np.int8)
    mask[NOTHING] = 1
    for change in guard.possible(context, state):
        if change.knob not in held:
            mask[_ACTIONS[change]] = 1
    return mask
