"""The core's side of copies between device and host memory: taken in and started at step boundaries. No torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.link_times import Mover

_log = logging.getLogger(__name__)


class TierCopies:
    """Between the cache, which plans copies, and the ``mover`` that makes them; None if there is no host tier."""

    def __init__(self, scheduler: Scheduler, mover: Mover | None) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self.mover = mover

    @property
    def may_copy(self) -> bool:
        """Whether copies are under way, or planning might find some."""
        return self.mover is not None and (self._cache.num_transfers > 0 or self._cache.has_transfer_plans())

    @property
    def wait_ns(self) -> int | None:
        """How long until the next copy may be done; None when none is under way."""
        return self.mover.wait_ns() if self.mover is not None and self._cache.num_transfers > 0 else None

    def receive(self) -> bool:
        """Take what has been copied since; whether there was anything."""
        numbers = self.mover.arrived() if self.mover is not None else []
        if numbers:
            self._cache.finish_transfers(numbers)
        return bool(numbers)

    def send(self) -> None:
        """Start copies. If that fails, the tier is switched off, and whoever waits for it computes its KV itself."""
        if self.mover is None:
            return
        transfers = self._cache.plan_transfers()
        try:
            self.mover.submit(transfers)
        except Exception:  # noqa: BLE001 - nothing is lost but the copies
            _log.exception("copying between device and host failed; host_offload stops")
            for request_id in self._cache.cancel_transfers([transfer.number for transfer in transfers]):
                self._scheduler.fail_load(request_id)
            self._cache.stop_offload()
