"""What sequences hold of a KV pool once all is stored as it should be, and how many of them it holds. No torch.

For sequences that share no prefix and have lost nothing to eviction, as they are right after a prompt of that length:
most of it in blocks of the current class, the recent tokens and the end of the last span in native ones (see
:mod:`engine.recode_targets`), and nothing that the model's own window has left behind. Exact, but that behind a window
up to a block less is held where a chunk of a prompt has leapt over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.formats import NATIVE, BlockClass, class_for, part_size
from engine.memory_model import RESERVE_SLABS, GroupSpec, PoolLayout, block_bytes, blocks_per_slab, pool_layout

Blocks = Mapping[BlockClass, int]
"""Blocks of each class in one layer group."""


@dataclass(frozen=True)
class Setting:
    """How KV is stored. ``recent_tokens`` stay native, as the engine is started with."""

    kv_format: str = NATIVE.name
    block_size: int = 16
    recent_tokens: int = 64


def sequence_blocks(group: GroupSpec, num_tokens: int, setting: Setting) -> Blocks:
    """Blocks that one sequence of ``num_tokens`` holds in a group.

    Raises ValueError for a format or block size that is not offered.
    """
    left_behind = 0 if group.window is None else num_tokens - group.window + 1
    left_behind = min(left_behind, num_tokens - 1)  # the last block always stays
    held: dict[BlockClass, int] = {}
    for start, number, block_class in _runs(group, num_tokens, setting):
        gone = min(number, max(0, left_behind - start) // block_class.block_size)
        if number > gone:
            held[block_class] = held.get(block_class, 0) + number - gone
    return held


def _runs(group: GroupSpec, num_tokens: int, setting: Setting) -> Iterator[tuple[int, int, BlockClass]]:
    """Runs of equal blocks in order: where each begins, and how many of which class."""
    target = class_for(group.format_under(setting.kv_format), setting.block_size)
    native_size, position = target.block_size, 0
    if not target.format.is_native:
        old = max(0, num_tokens - setting.recent_tokens)
        native_size, tile = part_size(setting.block_size), target.format.tile_tokens
        sizes = [target.block_size]
        if target.block_size > tile:  # what is old of a span that may still fill up is quantised in parts
            sizes.append(max(native_size, tile))
        for size in sizes:
            number = (old - position) // size
            yield position, number, BlockClass(target.kv_format, size)
            position += number * size
    yield position, -(-(num_tokens - position) // native_size), BlockClass(NATIVE.name, native_size)


def blocks_bytes(groups: Sequence[GroupSpec], held: Sequence[Blocks]) -> int:
    """Bytes of blocks, by group as ``groups``."""
    return sum(
        number * block_bytes(group.shape, block_class)
        for group, blocks in zip(groups, held, strict=True)
        for block_class, number in blocks.items()
    )


def sequences_that_fit(
    groups: Sequence[GroupSpec], layout: PoolLayout, held: Sequence[Blocks], *, spare_slabs: int = RESERVE_SLABS
) -> int:
    """How many sequences that hold ``held`` each the slabs of a pool can be cut for, ``spare_slabs`` kept free."""
    room = layout.num_slabs - spare_slabs

    def fits(sequences: int) -> bool:
        return all(
            sum(-(-sequences * number // per_slab) for number, per_slab in shares) <= room for shares in by_group
        )

    by_group = [
        [
            (number, blocks_per_slab(group.shape, block_class, layout.slab_tokens))
            for block_class, number in blocks.items()
        ]
        for group, blocks in zip(groups, held, strict=True)
    ]
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def spare_slabs(layout: PoolLayout, watermark: float) -> int:
    """Slabs that requests are not admitted to: the reserve, and the watermark's share of the rest, rounded up."""
    usable = layout.num_slabs - RESERVE_SLABS
    return RESERVE_SLABS + -(-int(watermark * usable * layout.slab_tokens) // layout.slab_tokens)


def pool_bytes_for(
    groups: Sequence[GroupSpec], held: Sequence[Blocks], sequences: int, watermark: float = 0.0
) -> int | None:
    """The smallest pool, in whole MiB, that holds so many sequences; None where offsets of 32 bits end before that."""

    def fits(mebibytes: int) -> bool:
        layout = pool_layout(groups, mebibytes << 20)
        return sequences_that_fit(groups, layout, held, spare_slabs=spare_slabs(layout, watermark)) >= sequences

    low, high = 0, 1
    while True:
        try:
            if fits(high):
                break
        except ValueError as error:
            if "32-bit" in str(error):
                return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        try:
            enough = fits(middle)
        except ValueError:  # too small for any slab
            enough = False
        low, high = (low, middle) if enough else (middle, high)
    return high << 20
