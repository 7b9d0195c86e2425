"""The same random lives for as long as it takes: ``pytest -m slow tests/property/test_cache_machine_long.py -s``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent))

from test_cache_machine import CacheMachine

OPERATIONS = int(os.environ.get("CACHE_MACHINE_OPERATIONS", "200000"))
STEPS = 50


class Counting(CacheMachine):
    """Counts the operations of all runs; the books are audited after each (``is_whole``)."""

    operations = 0

    @invariant()
    def count(self) -> None:
        type(self).operations += 1


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_operations_break_nothing() -> None:
    rounds = 0
    Counting.operations = 0
    while Counting.operations < OPERATIONS:
        rounds += 1
        run_state_machine_as_test(
            Counting,
            settings=settings(
                max_examples=500,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
        print(f"{Counting.operations} operations in {rounds} rounds, 0 violations", flush=True)
