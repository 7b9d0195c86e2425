"""How much KV to recode in a step: as much as takes a share of the step's own time. No torch.

A fixed number of tokens fits one load only. Beside one short request, whose step takes 5 ms, 512 tokens make every gap
between tokens half as long again; beside a full pool of long ones, whose step takes 0.3 s, they are nothing, and a
conversion takes minutes. A share of the time bounds what a conversion adds to every gap, and makes it fast where
steps are slow.
"""

from __future__ import annotations

_WEIGHT = 0.1  # of the newest reading in a running mean


class RecodePacer:
    """Learns what a step and a recoded token cost from readings of both; see :meth:`budget_tokens`.

    ``share``: of a step's time that recoding may add, planning and swapping included. ``least_tokens`` are recoded
    whatever they cost, so that a conversion always ends; ``most_tokens`` bounds what one wrong reading can do.
    """

    def __init__(self, share: float, *, least_tokens: int = 64, most_tokens: int = 16384) -> None:
        """Raises ValueError unless the share and the bounds make sense."""
        if not share > 0 or not 1 <= least_tokens <= most_tokens:
            raise ValueError(f"a share > 0 and 1 <= least <= most tokens, got {share}, {least_tokens}, {most_tokens}")
        self.share = share
        self.least_tokens = least_tokens
        self.most_tokens = most_tokens
        self._step_ns = 0.0
        self._last_step_ns = 0.0
        self._token_ns = 0.0

    def budget_tokens(self) -> int:
        """Tokens to recode beside the next step. The least until a step and a recoding have been measured.

        The shorter of the last step and the mean counts: a few slow prefills must not let the decodes after them wait.
        """
        if not self._token_ns or not self._step_ns:
            return self.least_tokens
        affordable = self.share * min(self._step_ns, self._last_step_ns) / self._token_ns
        return max(self.least_tokens, min(self.most_tokens, int(affordable)))

    def observe(self, step_ns: int, recode_ns: int, recoded_tokens: int) -> None:
        """A step took ``step_ns`` without its recoding, which took ``recode_ns`` for ``recoded_tokens``."""
        if step_ns > 0:
            self._last_step_ns = step_ns
            self._step_ns = _mean(self._step_ns, step_ns)
        if recode_ns > 0 and recoded_tokens > 0:
            self._token_ns = _mean(self._token_ns, recode_ns / recoded_tokens)


def _mean(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
