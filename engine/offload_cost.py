"""What moving KV costs against computing it again: estimates from the link's rates and measured prefill. No torch."""

from __future__ import annotations

from engine.stats import Counters
from engine.transfers import Direction, HostLink

_LEAST_QUEUE_NS = 4_000_000
_LONGEST_STEP_NS = 200_000_000  # longer gaps are pauses, not steps
_STEP_WEIGHT = 0.2
_STREAM_SHARE = 0.8  # of a step's time; the rest is for what else the link has to do


class OffloadCost:
    """Swap or recompute, load or recompute, and how much to have under way.

    ``counters``: the engine's, for the measured prefill time per token, with the time of attending over long contexts
    in its mean. Unknown (nothing measured yet) counts in favour of moving.
    """

    def __init__(self, link: HostLink, counters: Counters) -> None:
        self.link = link
        self._counters = counters
        self._step_ns = float(_LEAST_QUEUE_NS)
        self._waited_ns = 0

    @property
    def step_ns(self) -> float:
        """Smoothed time from step to step."""
        return self._step_ns

    def note_wait(self, wait_ns: int) -> None:
        """Computing has waited for streamed blocks: that is no part of a step's own time."""
        self._waited_ns += wait_ns

    def note_step(self, elapsed_ns: int) -> None:
        """A step took this long, waiting included."""
        elapsed_ns, self._waited_ns = elapsed_ns - self._waited_ns, 0
        if 0 < elapsed_ns < _LONGEST_STEP_NS:
            self._step_ns += _STEP_WEIGHT * (elapsed_ns - self._step_ns)

    def queue_bytes(self, direction: Direction) -> int:
        """Bytes to have under way at most: enough to keep the link busy until the next step looks after it, as an
        urgent copy waits for all of them.
        """
        return max(1, self.link.bytes_in(direction, max(_LEAST_QUEUE_NS, 1.5 * self._step_ns)))

    def stream_bytes(self) -> int:
        """Bytes that can be streamed in every step without making it much longer."""
        return self.link.bytes_in(Direction.IN, _STREAM_SHARE * self._step_ns)

    def prefill_ns(self, num_tokens: int) -> float | None:
        """Estimated time to compute so many tokens; None as long as none has been measured."""
        counters = self._counters
        if not counters.prefill_time_ns or not counters.prefill_tokens_computed:
            return None
        return counters.prefill_time_ns / counters.prefill_tokens_computed * num_tokens

    def swap_pays(self, num_bytes: int, queued_bytes: int, num_tokens: int) -> bool:
        """Whether moving out, after what is queued, and back in is faster than computing so many tokens again."""
        recompute_ns = self.prefill_ns(num_tokens)
        out_ns = self.link.copy_ns(Direction.OUT, num_bytes + queued_bytes)
        return recompute_ns is None or out_ns + self.link.copy_ns(Direction.IN, num_bytes) < recompute_ns

    def load_pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether so many bytes, all that wait before them included, come in faster than the tokens are computed."""
        recompute_ns = self.prefill_ns(num_tokens)
        return recompute_ns is None or self.link.copy_ns(Direction.IN, num_bytes) < recompute_ns
