"""Attention over blocks that stay on the host: their tiles come through two buffers, layer by layer. Imports torch.

The buffers lie at the end of each group's arena, behind the slabs. While layer l computes, the tiles of layer l + 1 are
copied into the other buffer, so that a step is only slower than one without streaming by what the link cannot hide. A
streamed tile has a block-table entry of its own. Kernels find a layer's part of a tile at

    offset * 256 + layer * tile_bytes

so the entry's offset is changed from layer to layer to make that the tile's place in the buffer: a slot starts at a
multiple of 256 and the tile ``layer * tile_bytes % 256`` bytes into it. Tiles and their order are those of the resident
case, so the results are the same to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.clock import Clock
from engine.link_times import EmulatedLink, StreamTimes
from engine.links import CopyBytes
from engine.stream_layout import stream_slot_bytes
from kernels.layout import ENTRY_FIRST, ENTRY_FORMAT, ENTRY_OFFSET, ENTRY_VALID, FORMATS, OFFSET_UNIT, KVShape

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Expanded:
    """A block table whose host blocks are replaced by their tiles: ``rows`` int32 [n, 4]; ``at``: which rows are
    streamed; ``source``: their tiles' first bytes on the host; ``codes``: their formats.
    """

    rows: Int32
    at: Int64
    source: Int64
    codes: Int64


def expand(rows: Int32, on_host: npt.NDArray[np.bool_], shape: KVShape) -> Expanded:
    """Give every tile of the host blocks among ``rows`` an entry of its own. Offsets of those are left undefined."""
    parts: list[Int32] = []
    at: list[int] = []
    source: list[int] = []
    codes: list[int] = []
    start = count = 0
    for index in np.flatnonzero(on_host).tolist():
        parts.append(rows[start:index])
        count += index - start
        offset, code, first, valid = rows[index].tolist()
        kv_format = FORMATS[code]
        tokens = kv_format.tile_tokens
        num_tiles = -(-valid // tokens)
        tiles = np.empty((num_tiles, 4), np.int32)
        tiles[:, ENTRY_OFFSET], tiles[:, ENTRY_FORMAT] = 0, code
        tiles[:, ENTRY_FIRST] = first + tokens * np.arange(num_tiles)
        tiles[:, ENTRY_VALID] = np.minimum(tokens, valid - tokens * np.arange(num_tiles))
        parts.append(tiles)
        at += range(count, count + num_tiles)
        stride = shape.tile_stride(kv_format)
        source += [offset * OFFSET_UNIT + tile * stride for tile in range(num_tiles)]
        codes += [code] * num_tiles
        count += num_tiles
        start = index + 1
    parts.append(rows[start:])
    return Expanded(
        np.concatenate(parts), np.array(at, np.int64), np.array(source, np.int64), np.array(codes, np.int64)
    )


@dataclass(frozen=True)
class GroupStream:
    """One group's streaming in one step, by layer of the group.

    ``cells``: int64 [n], where the streamed rows' offsets are in the flattened table. ``offsets``: int32 [layers, n].
    ``copies``: int64 [layers, n, 3], rows of ``copy_bytes`` from host to arena. ``num_bytes``: of one layer.
    """

    cells: Tensor
    offsets: Tensor
    copies: Tensor
    num_bytes: int


class StreamPlanner:
    """Where streamed tiles go, in one group: ``start`` is the first byte behind the slabs, ``half_bytes`` the size of
    each of the two buffers.
    """

    def __init__(self, shape: KVShape, start: int, half_bytes: int) -> None:
        self._layers = shape.num_layers
        self._start = start
        self._half_bytes = half_bytes
        self._tile_bytes = np.array([shape.tile_bytes(kind) for kind in FORMATS], np.int64)
        self._slot_bytes = np.array([stream_slot_bytes(shape, kind) for kind in FORMATS], np.int64)

    def plan(self, cells: Int64, source: Int64, codes: Int64, device: torch.device) -> GroupStream:
        """Lay tiles out in the buffers. Raises RuntimeError when they do not fit: bookkeeping has allowed too many."""
        slots = self._slot_bytes[codes]
        ends = np.cumsum(slots)
        if ends[-1] > self._half_bytes:
            raise RuntimeError(f"{ends[-1]} bytes of streamed tiles do not fit a buffer of {self._half_bytes}")
        size = self._tile_bytes[codes]
        layers = np.arange(self._layers, dtype=np.int64)[:, None]
        base = self._start + (layers & 1) * self._half_bytes + ends - slots
        inside = layers * size
        offsets = (base // OFFSET_UNIT - inside // OFFSET_UNIT).astype(np.int32)
        copies = np.stack([source + inside, base + inside % OFFSET_UNIT, np.broadcast_to(size, inside.shape)], axis=2)
        return GroupStream(
            torch.from_numpy(cells).to(device),
            torch.from_numpy(offsets).to(device),
            torch.from_numpy(np.ascontiguousarray(copies)),
            int(size.sum()),
        )


class Streamer(Protocol):
    """Brings streamed tiles in, in time for each layer."""

    def begin(self, group: int, stream: GroupStream, entries: Tensor) -> None:
        """A step that streams begins: start with the group's first layer. ``entries``: its table, int32, contiguous."""
        ...

    def layer(self, group: int, layer: int) -> None:
        """A layer's attention comes next: see that its tiles are there, set their offsets, start the next copy."""
        ...

    def take_wait_ns(self) -> int:
        """How long computing has waited for copies since this was last asked; 0 where nobody can tell."""
        ...


class EmulatedStreamer:
    """Over an emulated link, whose time passes while layers compute; what is left of it is waited for.

    ``on_copy(group, layer, begin_ns, due_ns)`` and ``on_wait(group, layer, begin_ns, end_ns)`` are for a timeline.
    """

    def __init__(
        self,
        arenas: Sequence[Tensor],
        hosts: Sequence[Tensor],
        line: EmulatedLink,
        clock: Clock,
        copy_bytes: CopyBytes,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._arenas = arenas
        self._hosts = hosts
        self._times = StreamTimes(line, clock, pause)
        self._clock = clock
        self._copy_bytes = copy_bytes
        self._steps: dict[int, tuple[GroupStream, Tensor]] = {}
        self.on_copy: Callable[[int, int, int, int], None] | None = None
        self.on_wait: Callable[[int, int, int, int], None] | None = None

    def begin(self, group: int, stream: GroupStream, entries: Tensor) -> None:
        self._steps[group] = stream, entries.view(-1)
        self._start(group, 0)

    def _start(self, group: int, layer: int) -> None:
        stream, _ = self._steps[group]
        begin_ns = self._clock.now_ns()
        due_ns = self._times.start(group, stream.num_bytes)
        self._copy_bytes(self._hosts[group], self._arenas[group], stream.copies[layer])
        if self.on_copy is not None:
            self.on_copy(group, layer, begin_ns, due_ns)

    def layer(self, group: int, layer: int) -> None:
        stream, cells = self._steps[group]
        begin_ns = self._clock.now_ns()
        self._times.wait(group)
        if self.on_wait is not None:
            self.on_wait(group, layer, begin_ns, self._clock.now_ns())
        cells[stream.cells] = stream.offsets[layer]
        if layer + 1 < len(stream.offsets):
            self._start(group, layer + 1)

    def take_wait_ns(self) -> int:
        return self._times.take_wait_ns()


class CudaStreamer:
    """Copies on a stream of its own. The compute stream waits for a layer's tiles, and a copy for the attention that
    last read its buffer; the host waits for neither.
    """

    def __init__(self, arenas: Sequence[Tensor], hosts: Sequence[Tensor], copy_bytes: CopyBytes) -> None:
        """``hosts`` are pinned."""
        self._arenas = arenas
        self._hosts = hosts
        self._copy_bytes = copy_bytes
        self._device = arenas[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._steps: dict[int, tuple[GroupStream, Tensor]] = {}
        self._copied: dict[int, torch.cuda.Event] = {}

    def begin(self, group: int, stream: GroupStream, entries: Tensor) -> None:
        self._steps[group] = stream, entries.view(-1)
        self._start(group, 0)

    def _start(self, group: int, layer: int) -> None:
        stream, _ = self._steps[group]
        free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        free.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(free)
        with torch.cuda.stream(self._stream):
            self._copy_bytes(self._hosts[group], self._arenas[group], stream.copies[layer])
            self._copied[group] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied[group].record(self._stream)

    def layer(self, group: int, layer: int) -> None:
        stream, cells = self._steps[group]
        torch.cuda.current_stream(self._device).wait_event(self._copied[group])
        cells[stream.cells] = stream.offsets[layer]
        if layer + 1 < len(stream.offsets):
            self._start(group, layer + 1)

    def take_wait_ns(self) -> int:
        return 0
