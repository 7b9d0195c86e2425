"""The host tier on a virtual clock: the emulated link's times without its bytes. No torch.

What goes where is decided by the engine's own :class:`engine.host_tier.HostTier`; what copies take by the engine's own
:class:`engine.link_times.EmulatedLink`. Here is only what a model's layers do between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.formats import FORMATS
from engine.link_times import EmulatedLink, StreamTimes
from engine.memory_model import GroupSpec
from engine.plan import ScheduledSequence
from envs.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from engine.cache_manager import CacheManager


class HostStreams:
    """Steps that attend blocks on the host. Every layer takes the same share of a step's own time."""

    def __init__(self, groups: Sequence[GroupSpec], line: EmulatedLink, clock: VirtualClock) -> None:
        self._shapes = [group.shape for group in groups]
        # Group of every layer, in the order in which a step comes to them.
        self._order = [
            group for _, group in sorted((layer, g) for g, spec in enumerate(groups) for layer in spec.layers)
        ]
        self._clock = clock
        self._times = StreamTimes(line, clock, self._pause)

    def _pause(self, duration_s: float) -> None:
        self._clock.advance_ns(max(1, round(1e9 * duration_s)))

    def run(self, elapsed_ns: int, sequences: Sequence[ScheduledSequence], cache: CacheManager) -> tuple[int, int]:
        """Let a step of ``elapsed_ns`` pass, and what it waits for; returns the bytes streamed (of all layers) and the
        nanoseconds waited.
        """
        by_group = [self._layer_bytes(sequences, cache, group) for group in range(len(self._shapes))]
        if not any(by_group):
            self._clock.advance_ns(elapsed_ns)
            return 0, 0
        left = [shape.num_layers for shape in self._shapes]
        for group, num_bytes in enumerate(by_group):
            if num_bytes:
                self._times.start(group, num_bytes)
        for number, group in enumerate(self._order):
            if by_group[group]:
                self._times.wait(group)
                left[group] -= 1
                if left[group]:
                    self._times.start(group, by_group[group])
            done = elapsed_ns * number // len(self._order)
            self._clock.advance_ns(elapsed_ns * (number + 1) // len(self._order) - done)
        read = sum(size * shape.num_layers for size, shape in zip(by_group, self._shapes, strict=True))
        return read, self._times.take_wait_ns()

    def _layer_bytes(self, sequences: Sequence[ScheduledSequence], cache: CacheManager, group: int) -> int:
        """Bytes of one layer of a group that lie on the host: whole tiles, as an executor copies them."""
        shape, num_bytes = self._shapes[group], 0
        for sequence in sequences:
            if cache.streams(sequence.request):
                for entry in cache.entries(sequence.request, group):
                    if entry.on_host:
                        kind = FORMATS[entry.format_code]
                        num_bytes += -(-entry.valid // kind.tile_tokens) * shape.tile_bytes(kind)
        return num_bytes
