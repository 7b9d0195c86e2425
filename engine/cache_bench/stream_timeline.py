"""A timeline of one decode step that streams old KV from the host: ``python -m engine.cache_bench.stream_timeline``.

Runs the bundled model with a conversation of some thousand tokens of which most lie on the host, behind an emulated
link, and draws when each layer's tiles were copied, and when computing waited. Used for docs/host-tier.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from engine.cache_bench.__main__ import BUNDLED_MODEL
from engine.clock import RealClock
from engine.loader import load_model
from engine.memory_model import token_bytes
from engine.offline import OfflineEngine
from engine.request import SamplingParams
from engine.streaming import EmulatedStreamer
from engine.transfers import HostLink

_WIDTH = 72  # columns
_STEPS = 20
_POOL_TOKENS = 2304  # 256 of them in reserve
_STREAMED_TOKENS = 512


@dataclass
class Trace:
    """Spans of one step in nanoseconds: copies by layer (on the link), waits by layer, and the step itself."""

    copies: dict[int, tuple[int, int]] = field(default_factory=dict)
    waits: dict[int, tuple[int, int]] = field(default_factory=dict)
    step: tuple[int, int] = (0, 0)

    def attach(self, streamer: EmulatedStreamer) -> None:
        streamer.on_copy = lambda _group, layer, begin, due: self.copies.update({layer: (begin, due)})
        streamer.on_wait = lambda _group, layer, begin, end: self.waits.update({layer: (begin, end)})

    def draw(self) -> list[str]:
        """A line per layer: ``=`` while its tiles are copied, ``#`` from its attention to the next layer's, ``.`` while
        that had to wait for the copy.
        """
        begin, end = self.step

        def column(stamp: int) -> int:
            return min(_WIDTH - 1, max(0, (stamp - begin) * _WIDTH // max(1, end - begin)))

        lines = []
        layers = sorted(self.copies)
        for layer in layers:
            row = [" "] * _WIDTH
            done = self.waits[layer + 1][0] if layer + 1 in self.waits else end
            for (start, stop), mark in (
                ((self.waits[layer][1], done), "#"),
                (self.waits[layer], "."),
                (self.copies[layer], "="),
            ):
                for at in range(column(start), max(column(start) + 1, column(stop))):
                    row[at] = mark if row[at] == " " or mark == "=" else row[at]
            lines.append(f"layer {layer} |{''.join(row)}|")
        return lines


def main() -> int:
    """Print the timeline of a median step."""
    loaded = load_model(BUNDLED_MODEL, "cpu", "auto")
    size = sum(token_bytes(group.shape) for group in loaded.groups)
    link = HostLink(4e8, 4e8)
    clock = RealClock()
    engine = OfflineEngine(
        loaded,
        pool_bytes=int(_POOL_TOKENS * size),
        values={"host_offload": "on", "max_num_batched_tokens": 2048},
        host_pool_bytes=int(8192 * size),
        link=link,
        staging_bytes=int(8192 * size),
        clock=clock,
    )
    result = engine.add([3 + i * 7 % 2000 for i in range(1900)], SamplingParams(max_tokens=120, ignore_eos=True))
    engine.step()
    host, streamer = engine.cache.host, engine.streamer
    if host is None or streamer is None:
        raise AssertionError("an engine with a host pool has both")
    plain = _times(engine, clock)
    size_in_group = [int(_STREAMED_TOKENS * token_bytes(group.shape)) for group in loaded.groups]
    host.cost.note_step(int(sorted(plain)[len(plain) // 2]))
    if not engine.cache.press_bytes(result.request, size_in_group):
        print("the link is too slow to stream within a step here")  # noqa: T201
        return 1
    # What another conversation of that length takes does not come back.
    engine.add([4 + i * 11 % 2000 for i in range(_STREAMED_TOKENS)], SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(_STEPS):
        engine.step()
    traces: list[Trace] = []
    for _ in range(_STEPS):
        trace = Trace()
        trace.attach(streamer)
        begin = clock.now_ns()
        engine.step()
        trace.step = begin, clock.now_ns()
        traces.append(trace)
    traces.sort(key=lambda trace: trace.step[1] - trace.step[0])
    chosen = traces[_STEPS // 2]
    streamed = engine.runner.last_work.host_bytes_read
    waited = sum(end - begin for begin, end in chosen.waits.values())
    took = chosen.step[1] - chosen.step[0]
    print(  # noqa: T201
        f"emulated link of {link.in_bytes_per_s / 1e6:.0f} MB/s; {streamed / 1e6:.2f} MB streamed in a step of "
        f"{took / 1e6:.2f} ms, of which {waited / 1e6:.2f} ms waiting; without streaming "
        f"{sorted(plain)[_STEPS // 2] / 1e6:.2f} ms"
    )
    print("\n".join(chosen.draw()))  # noqa: T201
    return 0


def _times(engine: OfflineEngine, clock: RealClock) -> list[int]:
    times = []
    for _ in range(_STEPS):
        begin = clock.now_ns()
        engine.step()
        times.append(clock.now_ns() - begin)
    return times


if __name__ == "__main__":
    sys.exit(main())
