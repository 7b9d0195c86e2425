"""What is scored: known token ids, and from where on. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """Known text. ``ids[:prompt]`` is the prompt, the rest is forced token by token as if it had been generated.

    Predictions of ``ids[score_from:]`` are judged. Eviction starts once a prompt is complete, so only what comes after
    it can show what eviction costs; to see a format at work a prompt alone is enough, and quicker.
    """

    ids: tuple[int, ...]
    prompt: int
    score_from: int

    def __post_init__(self) -> None:
        if not 1 <= self.prompt <= len(self.ids) or not 1 <= self.score_from < len(self.ids):
            raise ValueError(f"prompt {self.prompt} and score_from {self.score_from} of {len(self.ids)} tokens")


def windows(ids: Sequence[int], length: int, count: int, bos: int | None) -> list[list[int]]:
    """At most ``count`` pieces of ``length`` tokens, evenly spread over a text, none overlapping; each begins with
    ``bos`` where the model has one.
    """
    body = length - (bos is not None)
    count = min(count, len(ids) // body)
    if not count:
        return []
    stride = len(ids) // count
    start = [] if bos is None else [bos]
    return [[*start, *ids[index * stride : index * stride + body]] for index in range(count)]
