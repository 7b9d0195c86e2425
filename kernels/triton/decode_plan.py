# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - device code: types are Triton's, given by the arguments
"""What a decode step has to do, as a list on the device, and the scratch that is indexed by it.

A *piece* is what one sequence stores (or has evicted) between two multiples of `SPLIT_TOKENS` positions. The list names
every piece of a batch, in order of sequence and position, so that a launch needs to know neither how long sequences are
nor what classes their blocks have: a fixed number of programs walks the list. One recorded CUDA graph then serves every
batch of its size; a short sequence, or one that only pads the batch, costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.layout import CHUNK_TOKENS, QUANT_TILE_TOKENS, KVShape
from kernels.table import TableView
from kernels.triton.launch import adjacent_entries, longest_position

# Positions per piece; absolute, so neither batch nor block size moves a boundary. A multiple of 32.
SPLIT_TOKENS = 256
# Programs per multiprocessor. More than fit at once: pieces are not equally expensive, so the last ones even it out.
_PROGRAMS_PER_MULTIPROCESSOR = 8
_LANES = tl.constexpr(256)


@triton.jit
def reach(num_entries, query_first, sequence, window, valid):
    """Lowest and last position that a sequence's query attends to; last is -1 for padding. Scalars, or lanes."""
    count = tl.load(num_entries + sequence, mask=valid, other=0)
    # A padding sequence's position means nothing.
    last = tl.where(count > 0, tl.load(query_first + sequence, mask=valid, other=-1), -1)
    return tl.where(window > 0, tl.maximum(last - window + 1, 0), 0), last


@triton.jit(do_not_specialize=["num_sequences", "window", "capacity"])
def _decode_plan_kernel(
    num_entries, query_first, piece_starts, items, num_sequences, window, capacity, SPLIT: tl.constexpr
):
    """One program per sequence: what comes before it is few loads, and then nobody waits for anybody."""
    sequence = tl.program_id(0)
    before = sequence * 0
    first = before
    while first <= sequence:
        other = first + tl.arange(0, _LANES)
        lowest, last = reach(num_entries, query_first, other, window, other < num_sequences)
        pieces = tl.where(last >= 0, last // SPLIT - lowest // SPLIT + 1, 0)
        before += tl.sum(tl.where(other < sequence, pieces, 0), axis=0)
        first += _LANES
    lowest, last = reach(num_entries, query_first, sequence, window, True)
    after = before + tl.where(last >= 0, last // SPLIT - lowest // SPLIT + 1, 0)
    # A list that is too short ends early: whoever gave too little scratch gets no stray write.
    before = tl.minimum(before, capacity)
    after = tl.minimum(after, capacity)
    if sequence == 0:
        tl.store(piece_starts, 0)
    tl.store(piece_starts + sequence + 1, after)
    while before < after:
        item = before + tl.arange(0, _LANES)
        tl.store(items + item, sequence + tl.zeros([_LANES], tl.int32), mask=item < after)
        before += _LANES


@dataclass(frozen=True)
class MassScratch:
    """Scratch of the share of attention, any content. Per piece (float32): window_peak [capacity, heads, windows],
    chunk_sum [capacity, heads, chunks]; ``seen`` int32 [capacity, kv_heads], bit w: window w has a token. Per head:
    head_peak and head_total [sequences, heads].
    """

    window_peak: torch.Tensor
    chunk_sum: torch.Tensor
    seen: torch.Tensor
    head_peak: torch.Tensor
    head_total: torch.Tensor


@dataclass(frozen=True)
class DecodeScratch:
    """Scratch of one decode call, any content; calls on one stream may share it, and a CUDA graph keeps its own.

    Attributes:
        starts: int32 [sequences + 1], first piece of each sequence in the list, and the number of all.
        items: int32 [capacity], each piece's sequence.
        part_peak: float32 [capacity, heads], the softmax's maximum (base 2) over each piece.
        part_total: like ``part_peak``, its sum.
        part_sum: float32 [capacity, heads, head_dim], its weighted values.
        mass: what the share of attention needs besides, or None.
    """

    starts: torch.Tensor
    items: torch.Tensor
    part_peak: torch.Tensor
    part_total: torch.Tensor
    part_sum: torch.Tensor
    mass: MassScratch | None = None

    @classmethod
    def allocate(
        cls,
        query_shape: tuple[int, int, int],
        kv_heads: int,
        pieces: int,
        device: torch.device,
        *,
        mass: bool = False,
    ) -> DecodeScratch:
        """For queries [sequences, heads, head_dim] that together have up to ``pieces`` pieces."""
        sequences, heads, dim = query_shape

        # Each by itself: views of one tensor might lie at addresses that need another compiled kernel.
        def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        return cls(
            starts=empty(sequences + 1, dtype=torch.int32),
            items=empty(pieces, dtype=torch.int32),
            part_peak=empty(pieces, heads),
            part_total=empty(pieces, heads),
            part_sum=empty(pieces, heads, dim),
            mass=MassScratch(
                window_peak=empty(pieces, heads, SPLIT_TOKENS // QUANT_TILE_TOKENS),
                chunk_sum=empty(pieces, heads, SPLIT_TOKENS // CHUNK_TOKENS),
                seen=empty(pieces, kv_heads, dtype=torch.int32),
                head_peak=empty(sequences, heads),
                head_total=empty(sequences, heads),
            )
            if mass
            else None,
        )


@dataclass(frozen=True)
class PreparedDecode:
    """A step's list, written into ``scratch``, and how many programs share it."""

    scratch: DecodeScratch
    programs: int


def most_pieces(sequences: int, positions: int, window: int = 0) -> int:
    """Pieces that ``sequences`` sequences of up to ``positions`` positions may have."""
    pieces = triton.cdiv(positions, SPLIT_TOKENS)
    if window > 0:
        pieces = min(pieces, (window + SPLIT_TOKENS - 2) // SPLIT_TOKENS + 1)
    return int(sequences * pieces)


def decode_programs(device: torch.device) -> int:
    """Programs that share the list on a device, whatever the batch. The result does not depend on it."""
    if device.type != "cuda":
        return 5  # under the interpreter: few enough that each takes several pieces
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS_PER_MULTIPROCESSOR


def launch_plan(num_entries: torch.Tensor, query_first: torch.Tensor, scratch: DecodeScratch, *, window: int) -> None:
    """Write the list of a batch's pieces; allocates nothing and does not wait."""
    sequences = scratch.starts.shape[0] - 1
    _decode_plan_kernel[(sequences,)](
        num_entries, query_first, scratch.starts, scratch.items, sequences, window, scratch.items.shape[0],
        SPLIT=SPLIT_TOKENS, num_warps=4, num_stages=1,
    )  # fmt: skip


def plan_decode(
    table: TableView,
    shape: KVShape,
    heads: int,
    native_dtype: torch.dtype,  # noqa: ARG001 - the signature is every backend's
    *,
    window: int,
    mass: bool,
) -> PreparedDecode:
    """See :func:`kernels.ops.plan_decode`.

    Scratch is for as many pieces as the longest sequence may have: where ``table.max_position`` is unknown this reads
    ``table.query_first`` back, which waits for the device.
    """
    sequences, device = table.num_sequences, table.entries.device
    pieces = max(1, most_pieces(sequences, longest_position(table) + 1, window)) if sequences else 0
    scratch = DecodeScratch.allocate((sequences, heads, shape.head_dim), shape.num_kv_heads, pieces, device, mass=mass)
    if sequences:
        table = adjacent_entries(table)
        launch_plan(table.num_entries, table.query_first, scratch, window=window)
    return PreparedDecode(scratch, min(decode_programs(device), pieces * shape.num_kv_heads))
