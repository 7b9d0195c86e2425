"""Background jobs: never twice at once, one catch-up run at most, nothing stored across restarts (apscheduler#463)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from threading import Event

from apscheduler.jobstores.memory import MemoryJobStore

from autotune.housekeeping import Housekeeping


def test_jobs_run_and_a_failing_one_is_counted_and_runs_again() -> None:
    housekeeping, runs = Housekeeping(), []
    again = Event()

    def job() -> None:
        runs.append(1)
        if len(runs) > 1:
            again.set()
        raise ValueError("broken")

    housekeeping.every(0.02, "job", job)
    housekeeping.start()
    assert again.wait(60.0)
    housekeeping.stop()
    assert housekeeping.failures >= 2


def test_ten_missed_periods_are_one_catch_up_run_and_a_restart_has_none() -> None:
    """Case K.43. There is no stored job table to replay."""
    for _ in range(5):
        housekeeping = Housekeeping()
        housekeeping.every(60.0, "prune", lambda: None)
        housekeeping.every(60.0, "prune", lambda: None)  # the same id again replaces it
        scheduler = housekeeping._scheduler
        scheduler.start(paused=True)
        (job,) = scheduler.get_jobs()
        assert isinstance(scheduler._jobstores["default"], MemoryJobStore)
        assert (job.coalesce, job.max_instances, job.misfire_grace_time) == (True, 1, None)
        now = datetime.now(UTC)
        assert job.next_run_time > now, "nothing is due right after a start"
        missed = job._get_run_times(now + timedelta(seconds=600))
        assert len(missed) == 10
        runs = missed[-1:] if job.coalesce else missed
        assert len(runs) == 1
        scheduler.shutdown(wait=False)
