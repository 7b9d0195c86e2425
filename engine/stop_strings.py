"""Stop strings over a stream of text: nothing of a stop ever leaves, and whatever cannot become one leaves at once."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back the end of the text as long as it may be the start of a stop.

    The stop that is complete first wins; of two complete at the same character, the one that began first (the longer)
    does. The outcome does not depend on how the text was cut into deltas.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``include`` lets the matched stop itself out. Raises ValueError for an empty stop, which would match
        everywhere.
        """
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    @property
    def held(self) -> str:
        """Text that is kept back because a stop may have begun in it."""
        return self._held

    def feed(self, delta: str) -> str:
        """Text that may leave now. Once ``matched`` is set nothing more does."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return delta
        text = self._held + delta
        found = self._first_match(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text: the false start was one."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
