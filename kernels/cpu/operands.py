"""What rows are before a product: native, or float32 where the processor cannot multiply bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from kernels.cpu.compile import OVERLOADED
from kernels.cpu.lowlevel import load, store
from kernels.cpu.products import TILING


def operands_like(weights: Any, size: Any) -> Any:
    """An empty array of ``size`` elements for rows that :func:`kernels.cpu.products.multiply` takes beside ``weights``.

    For kernels only. In float32 what is stored has been rounded to the weights' dtype nevertheless.
    """
    raise NotImplementedError


@overload(operands_like, **OVERLOADED)
def _operands_like(weights: Any, size: Any) -> Any:  # noqa: ARG001
    def native(weights: Any, size: Any) -> Any:
        return np.empty(size, weights.dtype)

    def wide(weights: Any, size: Any) -> Any:  # noqa: ARG001
        return np.empty(size, np.float32)

    return wide if weights.dtype == types.uint16 and not TILING.has_dots else native


def as_operands(values: Any, at: Any, size: Any, scratch: Any) -> Any:
    """``values[at : at + size]``, native, as products take them, and where they begin: in place, or in ``scratch``,
    which is as :func:`operands_like` made it. For kernels only.
    """
    raise NotImplementedError


@overload(as_operands, **OVERLOADED)
def _as_operands(values: Any, at: Any, size: Any, scratch: Any) -> Any:  # noqa: ARG001
    def in_place(values: Any, at: Any, size: Any, scratch: Any) -> Any:  # noqa: ARG001
        return values, np.int64(at)

    def widened(values: Any, at: Any, size: Any, scratch: Any) -> Any:
        for i in range(size):
            store(scratch, i, load(values, at + i))
        return scratch, np.int64(0)

    return in_place if values.dtype == scratch.dtype else widened
