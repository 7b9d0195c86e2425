"""The CPU kernels' own small parts: the exponential, the cache's key, warming up without a place for the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

import kernels
from kernels import ops
from kernels.cpu import compile as cpu_compile
from kernels.cpu.lowlevel import exp_nonpositive, native_nearest
from kernels.cpu.tiles import elements_of
from kernels.cpu.vector_softmax import largest_score, weigh_scores


def test_exponential_is_accurate_and_keeps_nan() -> None:
    @njit
    def run(x: np.ndarray, out: np.ndarray) -> None:
        for i in range(x.shape[0]):
            out[i] = exp_nonpositive(x[i])

    x = np.concatenate((np.linspace(-87, 0, 20001), [-1e-8, -0.0])).astype(np.float32)
    out = np.empty_like(x)
    run(x, out)
    want = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - want) / want) < 2.5e-7
    edges = np.array([-87.5, -1e30, -np.inf, np.nan], dtype=np.float32)
    out = np.empty_like(edges)
    run(edges, out)
    assert np.all(out[:3] < 2e-38)
    assert np.isnan(out[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_the_native_dtype_is_torchs(dtype: torch.dtype) -> None:
    @njit
    def run(values: np.ndarray, out: np.ndarray) -> None:
        for i in range(values.shape[0]):
            out[i] = native_nearest(out, values[i])

    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    # Each native number, and what lies halfway to its neighbour and just beside that.
    bits = every.view(torch.int32)[:, None] + torch.tensor([0, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001])
    values = bits.to(torch.int32).view(torch.float32).flatten()
    out = torch.empty(values.shape, dtype=dtype)
    run(values.numpy(), elements_of(out, dtype))
    want = values.to(dtype)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out[~want.isnan()].view(torch.int16), want[~want.isnan()].view(torch.int16))


def test_vector_softmax_is_accurate_and_takes_only_its_span() -> None:
    @njit
    def run(scores: np.ndarray, begin: int, end: int) -> tuple[float, float]:
        peak = largest_score(scores, 0, scores.shape[0], begin, end)
        return peak, weigh_scores(scores, 0, scores.shape[0], begin, end, peak)

    scores = np.random.default_rng(0).normal(0, 30, 32).astype(np.float32)
    for begin, end in ((0, 32), (3, 30), (17, 18), (0, 1), (31, 32)):
        weights = scores.copy()
        weights[:begin], weights[end:] = np.nan, 1e30  # poison: must become 0
        peak, total = run(weights, begin, end)
        assert peak == scores[begin:end].max()
        want = np.zeros(32)
        want[begin:end] = np.exp(scores[begin:end].astype(np.float64) - peak)
        # The difference itself is rounded; below -87 the exponential stays at 1.6e-38.
        np.testing.assert_allclose(weights, want, rtol=1e-5, atol=2e-38)
        assert abs(total - want.sum()) < 1e-6 * want.sum()
    scores[5] = np.nan
    assert np.isnan(run(scores, 0, 32)[1])


def test_stamp_follows_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(cpu_compile.__file__).parent
    for path in folder.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(cpu_compile, "__file__", str(tmp_path / "compile.py"))
    before = cpu_compile.source_stamp()
    assert before == cpu_compile.source_stamp()
    with (tmp_path / "lowlevel.py").open("a") as file:
        file.write("# changed\n")
    assert cpu_compile.source_stamp() != before


def test_kernels_load_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """A hardened service: read-only package, no home. Importing must work; only compilation is not kept."""
    code = (
        "import importlib, numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"  # as when no locator finds a folder that it can write
        "module = importlib.import_module('kernels.cpu.write_kv')\n"
        "print(type(module._write_tokens._cache).__name__)\n"
    )
    root = Path(kernels.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.stdout.strip() == "NullCache", result.stderr


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_warm_up_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="native dtype"):
        ops.warm_up(torch.device("cpu"), dtype)


def test_warm_up_runs() -> None:
    ops.warm_up(torch.device("cpu"), torch.float32)
