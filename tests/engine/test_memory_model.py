"""Bytes, exact: against a sum written out by hand, and pools that are too small or awkward."""

from __future__ import annotations

import pytest

from engine.formats import class_for, lossiness_of
from engine.memory_model import (
    GroupSpec,
    blocks_per_slab,
    bytes_by_format,
    pool_capacity,
    pool_layout,
    sequence_bytes,
    slab_bytes,
    token_bytes,
)
from kernels.layout import INT4, INT8, K8V4, NATIVE, KVShape

SHAPE = KVShape(num_layers=6, num_kv_heads=2, head_dim=64, element_bytes=2)
GROUP = GroupSpec("full", tuple(range(6)), SHAPE)


@pytest.mark.parametrize("shape", [SHAPE, KVShape(3, 1, 96, 4), KVShape(1, 5, 8, 2)])
def test_block_bytes_are_the_formula_with_scales(shape: KVShape) -> None:
    for fmt in (INT8, K8V4, INT4):
        codes = 32 * shape.head_dim * (fmt.bits_k + fmt.bits_v) // 8
        scales = 2 * shape.element_bytes * (shape.head_dim + 32)
        size = shape.num_layers * shape.num_kv_heads * (codes + scales)
        assert shape.block_bytes(fmt, 32) == -(-size // 256) * 256
        assert token_bytes(shape, fmt) == size / 32
    native = shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * shape.element_bytes
    assert token_bytes(shape) == native
    assert shape.block_bytes(NATIVE, 16) == 16 * native


def test_slabs_hold_whole_blocks_of_every_native_size() -> None:
    for tokens in (256, 512, 1024):
        for size in (16, 32, 64, 128, 256):
            block_class = class_for("native", size)
            assert blocks_per_slab(SHAPE, block_class, tokens) * size == tokens
        for name in ("int8", "k8v4", "int4"):
            assert blocks_per_slab(SHAPE, class_for(name, 256), tokens) >= tokens // 256


def test_quantised_blocks_of_16_become_32_and_other_sizes_are_refused() -> None:
    assert class_for("int8", 16).block_size == 32
    assert class_for("native", 16).block_size == 16
    for size in (0, 8, 24, 512, "big", True):
        with pytest.raises(ValueError, match="16, 32, 64, 128, 256"):
            class_for("native", size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="native, int8, k8v4, int4"):
        class_for("fp8", 16)
    with pytest.raises(ValueError, match="native, int8"):
        lossiness_of("fp8")


def test_slab_size_shrinks_until_there_are_enough() -> None:
    token = int(token_bytes(SHAPE))
    assert pool_layout([GROUP], 32 * 1024 * token).slab_tokens == 1024
    assert pool_layout([GROUP], 32 * 1024 * token - 1).slab_tokens == 512
    assert pool_layout([GROUP], 32 * 512 * token - 1).slab_tokens == 256
    layout = pool_layout([GROUP], 10 * 256 * token + 5)
    assert (layout.slab_tokens, layout.num_slabs) == (256, 10)
    assert layout.arena_bytes(0) == layout.total_bytes == 10 * 256 * token


def test_too_small_a_pool_says_how_much_is_needed() -> None:
    least = 3 * slab_bytes(SHAPE, 256)
    assert pool_layout([GROUP], least).num_slabs == 3
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        pool_layout([GROUP], least - 1)
    with pytest.raises(ValueError, match="32-bit"):
        pool_layout([GROUP], 1 << 40)


def test_groups_share_a_pool_by_their_bytes_per_token() -> None:
    other = GroupSpec("window", (6, 7), KVShape(2, 1, 64, 2), window=128)
    layout = pool_layout([GROUP, other], 40 << 20)
    assert layout.arena_bytes(0) / layout.arena_bytes(1) == token_bytes(SHAPE) / token_bytes(other.shape)
    assert layout.total_bytes <= 40 << 20
    one = pool_capacity([GROUP, other], 40 << 20, "native", 16)
    assert one == (layout.num_slabs - 1) * layout.slab_tokens
    assert pool_capacity([GROUP, other], 40 << 20, "int4", 64) > 2.5 * one


def test_sequence_bytes_count_the_half_empty_block() -> None:
    assert sequence_bytes([GROUP], 17, "native", 16) == 2 * SHAPE.block_bytes(NATIVE, 16)
    assert sequence_bytes([GROUP], 1, "int8", 256) == SHAPE.block_bytes(INT8, 256)


def test_group_spec_checks_itself() -> None:
    with pytest.raises(ValueError, match="layers"):
        GroupSpec("g", (0,), SHAPE)
    with pytest.raises(ValueError, match="window"):
        GroupSpec("g", tuple(range(6)), SHAPE, window=0)


def test_bytes_by_format_add_up_groups_and_leave_protected_ones() -> None:
    free = GroupSpec("full", tuple(range(6)), SHAPE)
    kept = GroupSpec("protected-full", (6, 7), KVShape(2, 2, 64, 2), lossiest="native")
    sizes = bytes_by_format([free, kept])
    assert sizes["native"] == token_bytes(SHAPE) + token_bytes(kept.shape)
    assert sizes["int4"] == token_bytes(SHAPE, INT4) + token_bytes(kept.shape)
    assert list(sizes) == ["native", "int8", "k8v4", "int4"]
