"""Background jobs: never twice at once, one catch-up run at most, nothing stored across restarts (apscheduler#463)."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Any

import pytest
from apscheduler.jobstores.memory import MemoryJobStore

from autotune.housekeeping import Housekeeping
from engine.clock import ManualClock

PERIOD_S = 60.0


class Jobs:
    """A housekeeping with one job, whose scheduler has begun and holds still; runs are counted."""

    def __init__(self) -> None:
        self.clock = ManualClock(wall_start_s=datetime.now(UTC).timestamp())
        self.counted: Counter[str] = Counter()
        self.ran = Event()
        self.runs = 0
        self.housekeeping = Housekeeping(self.clock, lambda outcome, times: self.counted.update({outcome: times}))
        for _ in range(2):  # the same id again replaces it
            self.housekeeping.every(PERIOD_S, "prune", self._run)
        self.scheduler = self.housekeeping._scheduler
        self.scheduler.start(paused=True)
        (self.job,) = self.scheduler.get_jobs()

    def _run(self) -> None:
        self.runs += 1
        self.ran.set()

    def go_on(self) -> None:
        """Let the scheduler do what is due now, and all of it; then it ends."""
        self.scheduler.resume()
        assert self.ran.wait(10.0)
        self.housekeeping.stop()


def test_jobs_run_and_a_failing_one_is_counted_and_runs_again() -> None:
    counted: Counter[str] = Counter()
    housekeeping = Housekeeping(ManualClock(), lambda outcome, times: counted.update({outcome: times}))
    again = Event()

    def job() -> None:
        if counted["failed"]:
            again.set()
        raise ValueError("broken")

    housekeeping.every(0.02, "job", job)
    housekeeping.start()
    assert again.wait(60.0)
    housekeeping.stop()
    assert counted["failed"] >= 2
    assert set(counted) == {"failed"}


def test_ten_missed_periods_are_one_catch_up_run_and_are_counted() -> None:
    """Case K.43: late by far more than a second, it still runs, once."""
    jobs = Jobs()
    jobs.job.modify(next_run_time=datetime.now(UTC) - timedelta(seconds=10.5 * PERIOD_S))
    jobs.clock.advance_s(11 * PERIOD_S)
    jobs.go_on()
    assert jobs.runs == 1
    assert jobs.counted == {"done": 1, "missed": 10}


def test_a_run_on_time_misses_nothing() -> None:
    jobs = Jobs()
    jobs.job.modify(next_run_time=datetime.now(UTC))
    jobs.clock.advance_s(1.5 * PERIOD_S)
    jobs.go_on()
    assert jobs.counted == {"done": 1}


def test_five_restarts_replay_nothing() -> None:
    """Case K.43: there is no stored job table, so nothing is due right after a start, and no id is there twice."""
    for _ in range(5):
        jobs = Jobs()
        assert isinstance(jobs.scheduler._jobstores["default"], MemoryJobStore)
        assert jobs.job.next_run_time > datetime.now(UTC)
        jobs.housekeeping.stop()
        assert jobs.runs == 0


@pytest.mark.parametrize("back_s", [120, 86_400])
def test_a_wall_clock_that_was_set_back_keeps_no_job_waiting(back_s: int) -> None:
    """Case K.41 for the jobs: due within a period of the new time, and not when the old one comes again."""
    jobs = Jobs()
    jobs.clock.set_wall_s(jobs.clock.wall_s() - back_s)
    jobs.housekeeping.rearm()
    due = datetime.fromtimestamp(jobs.clock.wall_s(), UTC) + timedelta(seconds=PERIOD_S)
    assert jobs.scheduler.get_jobs()[0].next_run_time == due
    jobs.clock.advance_s(PERIOD_S)
    jobs.go_on()  # the scheduler's own clock has not been set back: it is due by that long ago
    assert jobs.counted == {"done": 1}


def test_a_wall_clock_that_was_set_forward_brings_one_run() -> None:
    """Case K.41 for the jobs: a day of periods by the wall clock, none by the monotonic one."""
    jobs = Jobs()
    jobs.job.modify(next_run_time=datetime.now(UTC) - timedelta(days=1))
    jobs.go_on()
    assert jobs.runs == 1
    assert jobs.counted == {"done": 1}


def test_the_daemon_looks_after_its_jobs_and_counts_them(make_rig: Any) -> None:
    rig = make_rig()
    jobs = rig.daemon._jobs
    jobs._scheduler.start(paused=True)
    (job,) = jobs._scheduler.get_jobs()
    assert job.id == "journal-prune"
    rig.clock.set_wall_s(datetime.now(UTC).timestamp() - 86_400)
    rig.run_s(1)
    period = timedelta(seconds=rig.config.housekeeping.prune_every_s)
    assert job.next_run_time <= datetime.fromtimestamp(rig.clock.wall_s(), UTC) + period
    job.func()
    jobs.stop()
    assert rig.metric("autotune_housekeeping_runs_total", outcome="done") == 1
    assert rig.metric("autotune_housekeeping_runs_total", outcome="missed") == 0
