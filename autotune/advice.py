"""What a daemon in advise mode recorded, as moments that can be played again: load, knobs in force, knobs advised."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from autotune.journal_file import Tick
from engine.tunables import TunableValue
from envs.spaces import Observation
from policies.advice_score import Moment
from policies.load import Lengths

QUIET_S: Final = 30.0
"""Advice counts as followed until the policy has wanted nothing for so long."""
_LONGEST_GAP_S: Final = 60.0


class AdviceReader:
    """Turns ticks into moments; ``advised`` counts the changes of what is advised, ``left_out`` the ticks not used."""

    def __init__(self) -> None:
        self.advised = 0
        self.left_out = 0
        self._advice: dict[str, TunableValue] = {}
        self._wanted_ns: int | None = None
        self._last_ns: int | None = None
        self._at_s = 0.0

    def read(self, ticks: Iterable[Tick]) -> list[Moment]:
        """The moments in advise mode in which the engine was well. Longer silences between them are left out."""
        moments = []
        for tick in ticks:
            body = tick.body
            if body.get("mode") != "advise" or "verdict" not in body:
                self.left_out += 1
                continue
            try:
                moments.append(self._moment(Observation.from_json(body["observation"]), body))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                self.left_out += 1
        return moments

    def _moment(self, observation: Observation, body: dict[str, Any] | Any) -> Moment:
        now_ns = observation.stamp_ns
        passed_s = 0.0 if self._last_ns is None else (now_ns - self._last_ns) / 1e9
        self._last_ns = now_ns
        if passed_s < 0 or passed_s > _LONGEST_GAP_S:
            passed_s, self._advice = 1.0, {}
        self._at_s += passed_s
        self._advise(now_ns, body)
        values = observation.values
        return Moment(
            self._at_s,
            values.get("offered_rps"),
            Lengths.of(values.get("prompt_tokens_p50"), values.get("prompt_tokens_p95")),
            Lengths.of(values.get("output_tokens_p50"), values.get("output_tokens_p95")),
            dict(observation.tunables),
            {**observation.tunables, **self._advice},
        )

    def _advise(self, now_ns: int, body: dict[str, Any] | Any) -> None:
        proposal = body.get("proposal")
        if proposal is not None:
            self._wanted_ns = now_ns
            knob, value = body.get("let_through") or proposal  # of a format, as far as the quality budget bears
            if body["verdict"][0] == "allowed" and self._advice.get(knob) != value:
                self._advice = {**self._advice, knob: value}
                self.advised += 1
        elif self._wanted_ns is not None and now_ns - self._wanted_ns > QUIET_S * 1e9:
            self._advice = {}
