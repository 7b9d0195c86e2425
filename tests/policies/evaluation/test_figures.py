"""The headline's comparisons, on made-up scores."""

from __future__ import annotations

from typing import Any

from policies.evaluation.cells import Score, Segment
from policies.evaluation.experiment import Results, best_policy
from policies.evaluation.figures import Terms, headline
from policies.evaluation.scenarios import SEGMENTS, Scenario
from policies.evaluation.table import NATIVE, Table

SCENARIOS = tuple(Scenario.parse(text) for text in ("reasoning-long@0.5", "regime-shift@1.2"))


def score(attainment: float, quality: float = 0.0) -> Score:
    fields: dict[str, Any] = dict.fromkeys(Score.__dataclass_fields__, 0)
    fields |= {
        "offered": 100, "completed": 100, "good": round(100 * attainment), "attainment": attainment,
        "goodput_rps": attainment, "tokens": 1000, "window_tokens": 1000, "prompt_tokens": 1000, "quality": quality,
        "segments": (Segment(good=round(100 * attainment / SEGMENTS), tokens=100),) * SEGMENTS,
        "decision_p99_ms": 0.3,
    }  # fmt: skip
    return Score(**fields)


def test_a_learned_policy_is_compared_with_rules_that_keep_the_budget() -> None:
    """The literature's rules do more and lose 5 %: they are nobody to be measured by where there are others."""
    rows = {
        NATIVE: [[score(0.5)] * 2] * 2,
        "default": [[score(0.7)] * 2] * 2,
        "literature": [[score(0.9, quality=0.05)] * 2] * 2,
        "learned:x": [[score(0.75)] * 2] * 2,
    }

    def minus_rules(*names: str) -> float:
        table = Table(SCENARIOS, {name: rows[name] for name in (NATIVE, *names)}, (NATIVE,), 0.005)
        found = headline(Results(table, best_policy(table, names), {}, None, {}, {}), names, Terms())
        return float(found["learned_minus_rules"]["value"])

    assert round(minus_rules("default", "literature", "learned:x"), 6) == 0.05
    assert round(minus_rules("literature", "learned:x"), 6) == -0.15, "where there are no others"
