"""What a workload is, whatever it came from: requests with arrival time, lengths and prefix identity. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise


class TraceError(ValueError):
    """A trace that cannot be used; the message is one line, names file and line, and says what was expected."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: ``arrival_s`` from the start of the trace, lengths in tokens, both at least 1.

    ``hash_ids``: identities of the prompt's consecutive blocks; two requests that begin with the same ids begin with
    the same tokens. Empty: the prompt shares nothing. ``source``: who sent it (a client, a session), where known.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, the first at or after 0 s.

    ``block_tokens``: prompt tokens per hash id (a fraction after scaling), 0 without ids. ``notes`` say, one line
    each, what was done to the source: sorted, clamped, skipped, scaled.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: float = 0.0
    notes: tuple[str, ...] = ()
    skipped_lines: int = 0

    @property
    def duration_s(self) -> float:
        """Arrival of the last request."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)


def from_requests(
    name: str,
    requests: Iterable[TraceRequest],
    *,
    block_tokens: float = 0.0,
    notes: tuple[str, ...] = (),
    skipped_lines: int = 0,
) -> Trace:
    """A trace from requests in any order: sorted stably by arrival, shifted so that the first arrives at 0 s.

    Both are said in the notes when they changed anything. Raises TraceError without requests.
    """
    given = list(requests)
    if not given:
        raise TraceError(f"{name}: no requests in it")
    late = sum(after.arrival_s < before.arrival_s for before, after in pairwise(given))
    if late:
        given.sort(key=lambda request: request.arrival_s)
        notes = (*notes, f"{late} rows were out of order of arrival: sorted")
    start = given[0].arrival_s
    if start:
        given = [replace(request, arrival_s=request.arrival_s - start) for request in given]
    return Trace(name, tuple(given), block_tokens, notes, skipped_lines)
