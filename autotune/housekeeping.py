"""Periodic jobs beside the control loop. Their timing follows the wall clock, so nothing that controls runs here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from apscheduler.schedulers.background import BackgroundScheduler

from engine.clock import Clock

OUTCOMES: Final = ("done", "failed", "missed")
_LOG: Final = logging.getLogger("autotune.housekeeping")


class Housekeeping:
    """Runs jobs in the background: never two runs of one at a time, and one catch-up run at most after a stall.

    The job store is in memory on purpose: a stored one would replay what it missed at every restart.
    """

    def __init__(self, clock: Clock, count: Callable[[str, int], None]) -> None:
        """``count``: told an outcome of :data:`OUTCOMES` and how often; called from the jobs' threads."""
        # Unlimited grace together with coalescing: a late run still happens, once.
        defaults = {"max_instances": 1, "coalesce": True, "misfire_grace_time": None}
        self._scheduler = BackgroundScheduler(job_defaults=defaults, timezone="UTC")
        self._clock, self._count = clock, count

    def every(self, seconds: float, name: str, job: Callable[[], object]) -> None:
        """Run ``job`` every so many seconds; what it raises is counted and logged, and it runs again next time.

        Periods that went by without a run of their own, by the monotonic clock, are counted as missed.
        """
        last_ns = self._clock.now_ns()

        def guarded() -> None:
            nonlocal last_ns
            now_ns = self._clock.now_ns()
            missed = int((now_ns - last_ns) / (seconds * 1e9)) - 1
            last_ns = now_ns
            if missed > 0:
                self._count("missed", missed)
                _LOG.warning("job %s: %d runs missed; this one makes up for them", name, missed)
            try:
                job()
            except Exception:  # noqa: BLE001  # a failing job must not end the daemon
                self._count("failed", 1)
                _LOG.exception("job %s failed", name)
            else:
                self._count("done", 1)

        self._scheduler.add_job(guarded, "interval", seconds=seconds, id=name, replace_existing=True)

    def rearm(self) -> None:
        """After the wall clock was set back: what would wait until it has caught up is due within its period again."""
        if not self._scheduler.running:
            return
        now = datetime.fromtimestamp(self._clock.wall_s(), UTC)
        for job in self._scheduler.get_jobs():
            if job.next_run_time - now > job.trigger.interval:
                job.modify(next_run_time=now + job.trigger.interval)

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        """Let a running job finish; start no other."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=True)
