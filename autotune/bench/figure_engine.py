"""An engine of figures alone, in this process: readings that somebody else makes up, tunables by the engine's rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from engine.clock import Clock
from engine.control_client import EngineUnreachable, PatchAnswer, TunablesView
from engine.readings import tunables_json
from engine.stats import EngineStats, Gauges
from engine.tunable_state import APPLIED, KnobOutcome, Patch, PatchOutcome, TunableState
from engine.tunables import TunableValue, default_values


class FigureEngine:
    """Implements the daemon's Control protocol. ``figures`` is what it tells; whoever uses it writes into that.

    ``is_away``: nobody answers. :meth:`restart`: another instance, counters at 0.
    """

    def __init__(self, clock: Clock, model: str, pool_bytes: int) -> None:
        self.clock = clock
        self.is_away = False
        self.instances = 0
        self._model, self._pool_bytes = model, pool_bytes
        self.restart()

    def restart(self) -> None:
        self.instances += 1
        now_ns = self.clock.now_ns()
        self.state = TunableState(default_values(), now_ns)
        self.figures = EngineStats(
            instance=f"instance-{self.instances}",
            model=self._model,
            stamp_ns=now_ns,
            max_model_len=4096,
            max_num_seqs=64,
            revision=0,
            effective={},
            gauges=Gauges(kv_pool_bytes=self._pool_bytes),
        )

    def stats(self) -> EngineStats:
        self.check_reachable()
        figures = self.figures
        figures.stamp_ns, figures.revision = self.clock.now_ns(), self.state.revision
        figures.effective = dict(self.state.effective)
        return EngineStats.from_json(json.loads(json.dumps(figures.to_json())))  # as over the wire

    def tunables(self) -> TunablesView:
        self.check_reachable()
        return cast("TunablesView", tunables_json(self.figures.instance, self.state, self.figures.gauges))

    def patch(
        self, changes: Mapping[str, TunableValue], *, writer: str, reason: str = "", if_revision: int | None = None
    ) -> PatchAnswer:
        self.check_reachable()
        patch = Patch(changes, writer, reason, if_revision)
        outcome = self.state.refusal(patch)
        if outcome is None:
            self.state.commit(patch, self.clock.now_ns())
            outcome = PatchOutcome(self.state.revision, dict.fromkeys(changes, KnobOutcome(APPLIED)))
        return cast("PatchAnswer", outcome.to_json())

    def check_reachable(self) -> None:
        """Raises EngineUnreachable while it is away."""
        if self.is_away:
            raise EngineUnreachable("no engine listens here")
