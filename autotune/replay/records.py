"""What is kept of every request that was sent: when, what came back, and how it failed. Stdlib only."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any


class Outcome(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by the user's interrupt, not the server's fault


@dataclass(slots=True)
class RequestRecord:
    """One request. Times in seconds from the start of the replay; ``token_times_s`` has one entry per output token.

    TTFT counts from the scheduled arrival, so that a late sender cannot hide the server's queue (nor its own delay).
    Tokens that share an event share its time: the gaps between them are 0, as on the wire.
    """

    index: int
    scheduled_s: float
    prompt_tokens: int
    asked_tokens: int
    sent_s: float | None = None
    finished_s: float | None = None
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    output_tokens: int = 0
    cached_tokens: int | None = None
    status: int | None = None
    finish_reason: str | None = None
    outcome: Outcome = Outcome.PENDING
    failure: str = ""  # a short kind, good as a key
    message: str = ""

    @property
    def send_delay_s(self) -> float | None:
        return None if self.sent_s is None else self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.scheduled_s if self.token_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Time between tokens, each gap."""
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.scheduled_s

    def to_json(self) -> dict[str, Any]:
        """All fields and the times of the tokens, for offline analysis."""
        values = asdict(self)
        values["token_times_s"] = [round(time_s, 6) for time_s in self.token_times_s]
        return values

    def fail(self, failure: str, message: str, now_s: float) -> None:
        if self.outcome is Outcome.PENDING:
            self.outcome, self.failure, self.message, self.finished_s = Outcome.FAILED, failure, message[:200], now_s
