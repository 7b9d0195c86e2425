from __future__ import annotations

import gc

import pytest
import torch

from kernels.memory import zeroed


@pytest.mark.parametrize("size", [0, 1, 4097, 5 << 20])
def test_memory_is_zero_and_can_be_written(size: int) -> None:
    memory = zeroed(size)
    gc.collect()  # the tensor is all that keeps it
    assert memory.dtype == torch.uint8
    assert memory.shape == (size,)
    assert not memory.any()
    memory.fill_(7)
    assert int(memory.sum()) == 7 * size


def test_what_no_machine_has_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="cannot allocate"):
        zeroed(1 << 62)
    with pytest.raises(RuntimeError, match="cannot allocate"):
        zeroed(1 << 70)
