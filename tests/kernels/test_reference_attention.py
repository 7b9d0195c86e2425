"""The references against what they are not made of: the original keys and values, and plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels import ops, reference
from kernels.layout import FORMATS, INT4, INT8, NATIVE, KVShape
from kernels.reference.gather import entry_positions
from kernels.reference.quantise import LEVELS
from kernels.reference.tolerances import storage_tolerance


def _by_hand(query: list[float], keys: list[list[float]], values: list[list[float]], scale: float) -> list[float]:
    scores = [scale * sum(q * k for q, k in zip(query, key, strict=True)) for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [sum(w * value[d] for w, value in zip(weights, values, strict=True)) / total for d in range(len(values[0]))]


@pytest.mark.parametrize("window", [0, 1, 5, 16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_attention_is_softmax_of_products_by_hand(kernel_cases: Any, window: int, backend: str) -> None:
    """Evicted positions 16..31 are gone; heads 0, 1 read KV head 0, heads 2, 3 KV head 1; queries see no future."""
    shape = KVShape(2, 2, 8, 4)
    generator = torch.Generator().manual_seed(1)
    kv = kernel_cases.random_kv(shape, 80, torch.float32, generator)
    pieces = [kernel_cases.Piece(NATIVE, 16, 0, 16), kernel_cases.Piece(NATIVE, 32, 32, 11)]
    cache = kernel_cases.build(shape, torch.float32, [(kv, pieces)], generator)
    stored = [*range(16), *range(32, 43)]
    query = torch.randn((3, 4, 8), generator=generator)
    out = kernel_cases.poisoned(query.shape, torch.float32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    ops.prefill_attention(
        query, cache.arena, shape, 1, cache.table([40]), starts, scale=0.3, window=window, out=out, backend=backend
    )
    last = kernel_cases.poisoned((1, 4, 8), torch.float32)
    ops.decode_attention(
        query[2:], cache.arena, shape, 1, cache.table([42]), scale=0.3, window=window, out=last, backend=backend
    )
    for i in range(3):
        position = 40 + i
        seen = [p for p in stored if p <= position and (not window or p > position - window)]
        for head in range(4):
            want = torch.tensor(
                _by_hand(
                    query[i, head].tolist(),
                    kv[1, 0, seen, head // 2].tolist(),
                    kv[1, 1, seen, head // 2].tolist(),
                    0.3,
                )
            )
            torch.testing.assert_close(out[i, head], want, rtol=1e-5, atol=1e-6)
            if i == 2:
                torch.testing.assert_close(last[0, head], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [48, 128])
def test_gather_returns_what_was_stored(kernel_cases: Any, dtype: torch.dtype, head_dim: int) -> None:
    """Native exactly, quantised within half a step of its own group; positions follow gaps."""
    shape = KVShape(2, 2, head_dim, dtype.itemsize)
    generator = torch.Generator().manual_seed(2)
    kv = kernel_cases.random_kv(shape, 340, dtype, generator)
    pieces = kernel_cases.mixed(300, FORMATS, hole=(64, 128))
    cache = kernel_cases.build(shape, dtype, [(kv, pieces)], generator)
    count = int(cache.num_entries[0])
    positions = entry_positions(cache.entries[0], count)
    assert positions.tolist() == [p for piece in pieces for p in range(piece.first, piece.first + piece.valid)]
    key, value = reference.gather_kv(cache.arena, shape, 1, cache.entries[0], count, native_dtype=dtype)
    place = 0
    for piece in pieces:
        got = (key[place : place + piece.valid], value[place : place + piece.valid])
        place += piece.valid
        want = kv[1, :, piece.first : piece.first + piece.valid].float()
        if piece.kv_format.is_native:
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
            continue
        for which, bits in enumerate((piece.kv_format.bits_k, piece.kv_format.bits_v)):
            groups = want[which].reshape(-1, 32, *want[which].shape[1:])
            dim = 1 if which == 0 else 3
            low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
            allowed = storage_tolerance(dtype, (high - low) / LEVELS[bits], groups.abs().amax(dim, keepdim=True))
            assert ((got[which].reshape(groups.shape) - groups).abs() <= allowed).all()


def test_float64_is_used_when_asked(kernel_cases: Any) -> None:
    shape = KVShape(1, 1, 64, 4)
    generator = torch.Generator().manual_seed(3)
    cache = kernel_cases.random_cache(shape, torch.float32, [kernel_cases.mixed(200, (INT8, INT4))], generator)
    query = torch.randn((1, 2, 64), generator=generator)
    outs = []
    for dtype in (torch.float32, torch.float64):
        outs.append(torch.empty((1, 2, 64), dtype=torch.float64))
        reference.decode_attention(
            query, cache.arena, shape, 0, cache.table([199]), scale=0.125, out=outs[-1], dtype=dtype
        )
    error = (outs[0] - outs[1]).abs().max()
    assert 0 < error < 1e-5


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_tokens_past_valid_never_matter(kernel_cases: Any, backend: str) -> None:
    """A block shared up to token k with another request's tail behind it (vllm-mlx#380): NaN or not, same bits."""
    shape = KVShape(1, 2, 64, 4)
    pieces = kernel_cases.prefix_hits(245)
    kv = kernel_cases.random_kv(shape, 300, torch.float32, torch.Generator().manual_seed(4))
    query = torch.randn((1, 4, 64), generator=torch.Generator().manual_seed(5))
    outs = []
    for poison in (255, 65):
        generator = torch.Generator().manual_seed(6)
        cache = kernel_cases.build(shape, torch.float32, [(kv, pieces)], generator, poison=poison)
        out = kernel_cases.poisoned(query.shape, torch.float32)
        ops.decode_attention(query, cache.arena, shape, 0, cache.table([244]), scale=0.125, out=out, backend=backend)
        outs.append(out)
    assert torch.isfinite(outs[0]).all()
    kernel_cases.assert_same_bits(outs[1], outs[0])
