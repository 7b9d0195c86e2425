"""Bytes of KV, exact: the scheduler, the simulator and planning all ask here. No torch.

    bytes = layers * kv_heads * head_dim * tokens * (bits_k + bits_v) / 8 + scales

taken from kernels.layout, which lays those bytes out. A pool is a number of *slabs* per layer group. Every group has
the same number of slabs of the same number of native tokens, so pool bytes are split over groups in proportion to
their native bytes per token, and a token that fits one group fits them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.formats import (
    FORMAT_BY_NAME,
    FORMATS,
    NATIVE,
    OFFSET_UNIT,
    BlockClass,
    KVFormat,
    KVShape,
    class_for,
    lossiness_of,
)

SLAB_TOKENS = (1024, 512, 256)  # native tokens per slab, the first that makes enough slabs is taken
ENOUGH_SLABS = 32
RESERVE_SLABS = 1  # never given to requests, so that recoding can always proceed
MIN_SLABS = 3  # the reserve, one for native blocks, one for those of another class
MAX_OFFSET = 2**31 - 1


@dataclass(frozen=True)
class GroupSpec:
    """A layer group: model layers of equal KV shape and attention window, in one arena.

    ``layers``: indices in the model, in the order of the group's layer axis. ``window``: the model's own sliding
    window in tokens, counting the current one; None for full attention. ``lossiest``: the lossiest format that its KV
    may take (``native`` protects it); None for any.
    """

    name: str
    layers: tuple[int, ...]
    shape: KVShape
    window: int | None = None
    lossiest: str | None = None

    def __post_init__(self) -> None:
        lossiness_of(self.lossiest)  # raises for an unknown name
        if len(self.layers) != self.shape.num_layers:
            raise ValueError(f"group {self.name}: {len(self.layers)} layers but a shape of {self.shape.num_layers}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"group {self.name}: a window counts the current token, so it is >= 1, got {self.window}")

    def format_under(self, kv_format: str) -> str:
        """The format that this group's KV takes where ``kv_format`` is asked for."""
        return kv_format if lossiness_of(kv_format) <= lossiness_of(self.lossiest) else str(self.lossiest)

    @property
    def is_protected(self) -> bool:
        """Whether it never takes some format."""
        return lossiness_of(self.lossiest) < lossiness_of(None)


@dataclass(frozen=True)
class PoolLayout:
    """How a pool is cut: ``num_slabs`` slabs of ``slab_tokens`` native tokens in every group."""

    slab_tokens: int
    num_slabs: int
    slab_bytes: tuple[int, ...]  # per group

    def arena_bytes(self, group: int) -> int:
        """Size of a group's arena in bytes."""
        return self.num_slabs * self.slab_bytes[group]

    @property
    def total_bytes(self) -> int:
        return self.num_slabs * sum(self.slab_bytes)


def block_bytes(shape: KVShape, block_class: BlockClass) -> int:
    """Bytes of one block of a class in one group, padding included."""
    return shape.block_bytes(block_class.format, block_class.block_size)


def token_bytes(shape: KVShape, kv_format: KVFormat = NATIVE) -> float:
    """Bytes per token of one group in a format, scales included (exact; a multiple of 1/32)."""
    return shape.tile_stride(kv_format) / kv_format.tile_tokens


def bytes_by_format(groups: Sequence[GroupSpec]) -> dict[str, float]:
    """Bytes per token of all groups, by the format that is asked for; protected groups keep their own."""
    return {
        kind.name: sum(token_bytes(group.shape, FORMAT_BY_NAME[group.format_under(kind.name)]) for group in groups)
        for kind in FORMATS
    }


def slab_bytes(shape: KVShape, slab_tokens: int) -> int:
    """Bytes of a slab that holds ``slab_tokens`` native tokens; a whole number of every class's largest block."""
    return slab_tokens // 256 * shape.block_bytes(NATIVE, 256)


def blocks_per_slab(shape: KVShape, block_class: BlockClass, slab_tokens: int) -> int:
    """How many blocks of a class one slab holds."""
    return slab_bytes(shape, slab_tokens) // block_bytes(shape, block_class)


def pool_layout(groups: Sequence[GroupSpec], pool_bytes: int) -> PoolLayout:
    """Cut a pool into slabs: 1024 native tokens each, 512 or 256 where that gives fewer than 32 of them.

    Raises ValueError for a pool under ``MIN_SLABS`` of the smallest slabs, or beyond int32 block offsets.
    """
    if not groups:
        raise ValueError("a KV pool needs at least one layer group")
    for slab_tokens in SLAB_TOKENS:
        sizes = tuple(slab_bytes(group.shape, slab_tokens) for group in groups)
        num_slabs = pool_bytes // sum(sizes)
        if num_slabs >= ENOUGH_SLABS or slab_tokens == SLAB_TOKENS[-1]:
            break
    if num_slabs < MIN_SLABS:
        raise ValueError(
            f"a KV pool of {pool_bytes} bytes is too small for this model; give it at least "
            f"{MIN_SLABS * sum(sizes)} bytes"
        )
    if num_slabs * max(sizes) // OFFSET_UNIT > MAX_OFFSET:
        raise ValueError(f"a KV pool of {pool_bytes} bytes is beyond 32-bit block offsets; give it less")
    return PoolLayout(slab_tokens, num_slabs, sizes)


def host_layout(layout: PoolLayout, host_pool_bytes: int) -> PoolLayout:
    """Cut host memory into slabs like those of the device's pool. Raises ValueError for less than one of each group."""
    num_slabs = host_pool_bytes // sum(layout.slab_bytes)
    if num_slabs < 1:
        raise ValueError(
            f"a host pool of {host_pool_bytes} bytes is too small for this model; give it at least "
            f"{sum(layout.slab_bytes)} bytes"
        )
    if num_slabs * max(layout.slab_bytes) // OFFSET_UNIT > MAX_OFFSET:
        raise ValueError(f"a host pool of {host_pool_bytes} bytes is beyond 32-bit block offsets; give it less")
    return PoolLayout(layout.slab_tokens, num_slabs, layout.slab_bytes)


def pool_capacity(
    groups: Sequence[GroupSpec], pool_bytes: int, kv_format: str, block_size: int, *, reserve_slabs: int = 1
) -> int:
    """Tokens that a pool holds when all is in one class, as far as its group allows; ``reserve_slabs`` stay free."""
    layout = pool_layout(groups, pool_bytes)
    per_slab = min(
        blocks_per_slab(group.shape, block_class, layout.slab_tokens) * block_class.block_size
        for group, block_class in _classes(groups, kv_format, block_size)
    )
    return max(0, layout.num_slabs - reserve_slabs) * per_slab


def sequence_bytes(groups: Sequence[GroupSpec], num_tokens: int, kv_format: str, block_size: int) -> int:
    """Bytes of the blocks that one sequence of ``num_tokens`` takes in one class, half-empty last block included."""
    return sum(
        -(-num_tokens // block_class.block_size) * block_bytes(group.shape, block_class)
        for group, block_class in _classes(groups, kv_format, block_size)
    )


def _classes(groups: Sequence[GroupSpec], kv_format: str, block_size: int) -> Iterator[tuple[GroupSpec, BlockClass]]:
    """The class that blocks of each group take."""
    for group in groups:
        yield group, class_for(group.format_under(kv_format), block_size)
