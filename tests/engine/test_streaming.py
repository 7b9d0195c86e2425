"""Where streamed tiles lie, layer by layer: at the address that kernels compute from the entry's offset."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.clock import ManualClock
from engine.link_times import EmulatedLink
from engine.stream_layout import stream_buffers, stream_slot_bytes
from engine.streaming import EmulatedStreamer, GroupStream, StreamPlanner, expand
from engine.transfers import HostLink
from kernels import ops
from kernels.layout import FORMATS, INT4, INT8, NATIVE, KVShape

SHAPES = [KVShape(3, 2, 16, 2), KVShape(4, 1, 8, 4), KVShape(2, 3, 24, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_layer_of_every_tile_lies_where_its_offset_says(shape: KVShape) -> None:
    start, half = 64 * 1024, 256 * 1024
    codes = np.array([kind.code for kind in FORMATS for _ in range(3)], np.int64)
    source = np.arange(len(codes), dtype=np.int64) * 65536
    stream = StreamPlanner(shape, start, half).plan(np.arange(len(codes)), source, codes, torch.device("cpu"))
    for layer in range(shape.num_layers):
        spans = []
        for tile, code in enumerate(codes):
            size = shape.tile_bytes(FORMATS[code])
            address = int(stream.offsets[layer, tile]) * 256 + layer * size
            assert stream.copies[layer, tile].tolist() == [int(source[tile]) + layer * size, address, size]
            buffer = start + (layer & 1) * half
            assert buffer <= address
            assert address + size <= buffer + half
            spans.append((address, address + size))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "tiles overlap"


def test_more_than_a_buffer_holds_is_refused() -> None:
    shape = SHAPES[0]
    half = 2 * stream_slot_bytes(shape, NATIVE)
    planner = StreamPlanner(shape, 0, half)
    codes = np.zeros(3, np.int64)
    planner.plan(codes[:2], codes[:2], codes[:2], torch.device("cpu"))
    with pytest.raises(RuntimeError, match="do not fit"):
        planner.plan(codes, codes, codes, torch.device("cpu"))


def test_host_blocks_become_tiles_and_others_stay() -> None:
    shape = SHAPES[0]
    blocks = [[10, NATIVE.code, 0, 64], [20, INT8.code, 64, 64], [30, INT4.code, 128, 40], [40, NATIVE.code, 176, 5]]
    rows = np.array(blocks, np.int32)
    found = expand(rows, np.array([True, False, True, False]), shape)
    # A native tile holds 16 tokens, a quantised one 32; of the last only 8 are valid.
    assert found.rows[:, 1:].tolist() == [
        [0, 0, 16], [0, 16, 16], [0, 32, 16], [0, 48, 16],
        [INT8.code, 64, 64],
        [INT4.code, 128, 32], [INT4.code, 160, 8],
        [0, 176, 5],
    ]  # fmt: skip
    assert found.rows[[4, 7], 0].tolist() == [20, 40]
    assert found.at.tolist() == [0, 1, 2, 3, 5, 6]
    native, int4 = shape.tile_stride(NATIVE), shape.tile_stride(INT4)
    assert found.source.tolist() == [2560 + native * i for i in range(4)] + [7680, 7680 + int4]
    assert found.codes.tolist() == [0] * 4 + [INT4.code] * 2


def test_a_layer_waits_for_its_copy_only_and_the_next_one_is_under_way() -> None:
    clock = ManualClock()
    arena, host = torch.zeros(4096, dtype=torch.uint8), torch.arange(4096).to(torch.uint8)
    line = EmulatedLink(HostLink(1e6, 1e6), clock)
    streamer = EmulatedStreamer([arena], [host], line, clock, ops.copy_bytes, pause=clock.advance_s)
    copies = torch.tensor([[[1000 * layer, 2000 + 1000 * (layer & 1), 1000]] for layer in range(3)])
    offsets = torch.tensor([[7], [8], [9]], dtype=torch.int32)
    entries = torch.zeros(1, 2, 4, dtype=torch.int32)
    streamer.begin(0, GroupStream(torch.tensor([4]), offsets, copies, 1000), entries)
    streamer.layer(0, 0)
    assert clock.now_ns() == 1_000_000  # nothing hides the first one
    assert entries[0, 1, 0] == 7
    clock.advance_s(0.0025)  # a layer computes for longer than a copy takes
    streamer.layer(0, 1)
    assert clock.now_ns() == 3_500_000
    assert torch.equal(arena[3000:4000], host[1000:2000])
    clock.advance_s(0.0004)  # and one for less
    streamer.layer(0, 2)
    assert clock.now_ns() == 4_500_000
    assert entries[0, 1, 0] == 9
    assert streamer.take_wait_ns() == 1_000_000 + 600_000
    assert streamer.take_wait_ns() == 0


def test_buffers_share_what_there_is_in_proportion() -> None:
    assert stream_buffers((3000, 1000), 8192) == (3072, 1024)
    assert stream_buffers((3000, 1000), 0) == (0, 0)
