"""What the rows of ``python -m envs.bench_sim`` share: options, traces, a model with its profile and live engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.tunable_state import Patch
from engine.tunables import TunableValue
from envs.fidelity import Comparison, compare, figures, simulate
from envs.profile import Profile
from envs.simulator import SimOptions
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import generate
from envs.workload.loaders import load_trace
from envs.workload.scaling import Scaling, scale
from envs.workload.trace import Trace, TraceRequest, from_requests

if TYPE_CHECKING:
    from envs.live_run import LiveEngineRun

PROFILES: Final = Path(__file__).parent / "profiles"
MODEL: Final = Path("engine/bundled/model")
POOL_BYTES: Final = 24 << 20
# Prompts and outputs of big models' traces, for a small one.
_LENGTH_SCALE: Final = 8.0
# Prompts, then decodes together: what the engine does, in a third of a second.
_GAUGE: Final = from_requests("gauge", [TraceRequest(0.0, 150 + 40 * i, 24) for i in range(6)])


@dataclass(frozen=True)
class Context:
    """What rows need. ``traces``: folder of public traces, None for generated ones alone. ``shake_steps``: of random
    actions, over so many ``processes``.
    """

    model: Path
    traces: Path | None
    quick: bool
    cpu_time: bool
    shake_steps: int
    processes: int
    log: Callable[[str], None]

    def trace(self, name: str, fallback: str, duration_s: float) -> Trace:
        """A public trace if its file is there, else a workload fitted to it."""
        path = None if self.traces is None else self.traces / f"{name}.csv.gz"
        if path is not None and path.is_file():
            return load_trace(path)
        return generate(CATALOGUE[fallback], duration_s=duration_s, seed=1)


class Bench:
    """A loaded model, its profile and its live engine with a KV pool: what the fidelity rows share."""

    def __init__(self, context: Context, pool_bytes: int = POOL_BYTES) -> None:
        import torch  # noqa: PLC0415

        from engine.loader import load_model  # noqa: PLC0415
        from envs.live_run import LiveEngineRun  # noqa: PLC0415

        # One thread: two would wait for whatever else runs on the machine.
        torch.set_num_threads(1)
        self.context = context
        self._loaded = load_model(context.model)
        self.pool_bytes = pool_bytes
        self.live: LiveEngineRun = LiveEngineRun(self._loaded, pool_bytes, cpu_time=context.cpu_time)
        before_s = self.gauge_s()
        self.profile = self.measure()
        self.profile_gauge_s = (before_s + self.gauge_s()) / 2

    def measure(self) -> Profile:
        """The machine as it is now."""
        from envs.live_run import CpuClock  # noqa: PLC0415
        from envs.measured import measure_profile  # noqa: PLC0415

        self.context.log("measuring a profile")
        clock = CpuClock() if self.context.cpu_time else None
        quick = self.context.quick
        return measure_profile(self._loaded, pool_bytes=128 << 20, created="", versions={}, quick=quick, clock=clock)

    def gauge_s(self) -> float:
        """How long the machine takes, now, for a fixed piece of the engine's work, per token of output: median of
        three.
        """
        taken = []
        for _ in range(3):
            records = self.live.run(_GAUGE, self.options({})).records
            taken.append(1.0 / figures(records)["throughput"])
        return statistics.median(taken)

    def options(self, values: Mapping[str, TunableValue]) -> SimOptions:
        longest = self._loaded.config.max_model_len
        return SimOptions(self.pool_bytes, longest, values=dict(values), max_waiting=1 << 20, recode_share=0.15)

    def case(
        self,
        trace: Trace,
        values: Mapping[str, TunableValue],
        repeats: int,
        changes: Sequence[tuple[float, Patch]] = (),
    ) -> Comparison:
        """One trace, live several times, each run beside its simulation on a machine as fast as it was just then."""
        options, model = self.options(values), self.profile.latency_model()
        live, simulated, speeds = [], [], []
        before_s = self.gauge_s()
        for _ in range(repeats):
            live.append(figures(self.live.run(trace, options, changes).records))
            after_s = self.gauge_s()
            speeds.append((before_s + after_s) / 2 / self.profile_gauge_s)
            before_s = after_s
            records, _ = simulate(self.profile.groups(), model.scaled(speeds[-1]), trace, options, changes)
            simulated.append(figures(records))
        records, _ = simulate(self.profile.groups(), model, trace, options, changes)
        return compare(live, simulated, figures(records), speeds)


def small(trace: Trace) -> Trace:
    """For a small model: shorter, and no longer than it takes."""
    small = scale(trace, Scaling(length_scale=_LENGTH_SCALE, max_requests=600, max_prompt_tokens=1500))
    return replace(small, requests=tuple(r for r in small.requests if r.prompt_tokens + r.output_tokens < 4000))
