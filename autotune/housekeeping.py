"""Periodic jobs beside the control loop. Their timing follows the wall clock, so nothing that controls runs here."""

from __future__ import annotations

import logging
from collections.abc import Callable

from apscheduler.schedulers.background import BackgroundScheduler


class Housekeeping:
    """Runs jobs in the background: never two runs of one at a time, and one catch-up run at most after a stall.

    The job store is in memory on purpose: a stored one would replay what it missed at every restart.
    """

    def __init__(self) -> None:
        # Unlimited grace together with coalescing: a late run still happens, once.
        defaults = {"max_instances": 1, "coalesce": True, "misfire_grace_time": None}
        self._scheduler = BackgroundScheduler(job_defaults=defaults, timezone="UTC")
        self.failures = 0

    def every(self, seconds: float, name: str, job: Callable[[], object]) -> None:
        """Run ``job`` every so many seconds; what it raises is counted and logged, and it runs again next time."""

        def guarded() -> None:
            try:
                job()
            except Exception:  # a failing job must not end the daemon
                self.failures += 1
                logging.getLogger("autotune.housekeeping").exception("job %s failed", name)

        self._scheduler.add_job(guarded, "interval", seconds=seconds, id=name, replace_existing=True)

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        """Let a running job finish; start no other."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=True)
