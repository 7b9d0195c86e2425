"""The full grid of shapes under Triton's interpreter: `make kernel-grid`, some 20 minutes; CI runs a pairwise subset.

Every dtype with every head size, grouping and window, over sequences of one format each and of all mixed.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only)")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("make kernel-grid sets TRITON_INTERPRET=1", allow_module_level=True)

from kernels.layout import FORMATS, INT4, NATIVE
from kernels.triton import cases, checks
from kernels.triton.cases import Geometry

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GEOMETRIES = [
    Geometry(dtype, dim, kv_heads=kv_heads, group=group)
    for dtype in DTYPES
    for dim in (64, 80, 96, 128, 256)
    for kv_heads, group in ((2, 1), (1, 2), (2, 4), (1, 7))
]
SEQUENCES = [
    *(cases.mixed_segments(77, (kv_format,), (32,)) for kv_format in FORMATS),
    cases.mixed_segments(290, FORMATS, (32, 64, 16, 128)),
    cases.mixed_segments(289, (INT4, NATIVE), (32, 16), hole=(32, 176)),
    cases.shared_prefix_segments(),
    cases.mixed_segments(1, (NATIVE,), (16,)),
]
NEW = [5, 77, 1, 12, 37, 3, 21, 1]


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_attention(geometry: Geometry, window: int) -> None:
    seed = 1000 * geometry.head_dim + 10 * geometry.group + window
    checks.check_decode(geometry, SEQUENCES, CPU, window=window, seed=seed)
    checks.check_prefill(geometry, SEQUENCES, NEW, CPU, window=window, seed=seed + 1)
    checks.check_mass(geometry, SEQUENCES, NEW, CPU, last=16, window=window, seed=seed + 2)


@pytest.mark.parametrize("geometry", GEOMETRIES[::4], ids=str)
def test_storage(geometry: Geometry) -> None:
    checks.check_write(geometry, CPU, seed=geometry.head_dim)
    checks.check_gather(geometry, SEQUENCES[4], CPU, seed=geometry.head_dim)
    for scale in (1.0, 1e-5, 300.0):
        checks.check_recode(geometry, CPU, seed=geometry.head_dim, scale=scale)


@pytest.mark.parametrize("geometry", GEOMETRIES[2::4], ids=str)
def test_block_sizes(geometry: Geometry) -> None:
    runs = [(kv_format, 128) for kv_format in FORMATS] + [(NATIVE, 45)]
    checks.check_block_sizes(geometry, runs, (128, 64, 32, 16), CPU, seed=geometry.head_dim)
