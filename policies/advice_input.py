"""What another policy would do, as entries behind the observation: for networks that decide when to overrule it.

Layout: the observation's vector, then one entry per change of :func:`envs.spaces.all_changes`, 1 for the change that is
advised and 0 for all others; all 0 where nothing is. numpy only.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.spaces import NOTHING, all_changes, encode_action, legal_action, vector_names
from policies.base import Change

ADVICE_ENTRIES: Final = len(all_changes())


def advised_names() -> tuple[str, ...]:
    """What each entry of an observation with advice is; the last ones ``advised:kv_format=int8`` and so on."""
    return (*vector_names(), *(f"advised:{change.knob}={change.value}" for change in all_changes()))


def with_advice(vector: NDArray[np.float32], advised: Change | None, mask: NDArray[np.int8]) -> NDArray[np.float32]:
    """``vector`` and behind it what is advised, which is nothing where the mask forbids it."""
    advice = np.zeros(ADVICE_ENTRIES, dtype=np.float32)
    action = legal_action(encode_action(advised), mask)
    if action != NOTHING:
        advice[action - 1] = 1.0
    return np.concatenate([vector, advice])


def advised_actions(vectors: NDArray[np.float32]) -> NDArray[np.int64]:
    """What is advised in each of ``vectors`` [rows, entries]: int64 [rows]."""
    advice = vectors[:, -ADVICE_ENTRIES:]
    return np.where(advice.any(axis=1), NOTHING + 1 + advice.argmax(axis=1), NOTHING).astype(np.int64)
