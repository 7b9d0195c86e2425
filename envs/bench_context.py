"""What the rows of ``python -m envs.bench_sim`` share: options, traces, a model with its profile and live engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.tunable_state import Patch
from engine.tunables import TunableValue
from envs.fidelity import Comparison, compare, figures, simulate
from envs.simulator import SimOptions
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import generate
from envs.workload.loaders import load_trace
from envs.workload.scaling import Scaling, scale
from envs.workload.trace import Trace

if TYPE_CHECKING:
    from engine.profiling.measure import Round
    from envs.live_run import LiveEngineRun

PROFILES: Final = Path(__file__).parent / "profiles"
MODEL: Final = Path("engine/bundled/model")
POOL_BYTES: Final = 24 << 20
# Prompts and outputs of big models' traces, for a small one.
_LENGTH_SCALE: Final = 8.0
# A latency model is of so many looks, of loads of so many prompt tokens at most.
_LOOKS: Final = 6
_PROFILE_TOKENS: Final = 5000
_PROFILE_POOL_BYTES: Final = 64 << 20


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
    """A loaded model, its latency model and its live engine with a KV pool: what the fidelity rows share.

    A shared machine is not always equally fast, so the latency model is that of the last few looks at the machine, and
    live runs have them before, between and after.
    """

    def __init__(self, context: Context, pool_bytes: int = POOL_BYTES) -> None:
        import torch  # noqa: PLC0415

        from engine.loader import load_model  # noqa: PLC0415
        from engine.profiling.measure import Measurer  # noqa: PLC0415
        from envs.live_run import CpuClock, LiveEngineRun  # noqa: PLC0415

        # One thread: two would wait for whatever else runs on the machine.
        torch.set_num_threads(1)
        self.context = context
        self._loaded = load_model(context.model)
        self.groups = self._loaded.groups
        self.pool_bytes = pool_bytes
        self.live: LiveEngineRun = LiveEngineRun(self._loaded, pool_bytes, cpu_time=context.cpu_time)
        clock = CpuClock() if context.cpu_time else None
        self._measurer: Measurer = Measurer(self._loaded, _PROFILE_POOL_BYTES, clock=clock)
        self._measurer.warm_up()
        self._looks: deque[Round] = deque(maxlen=_LOOKS)
        for _ in range(_LOOKS):
            self.look()

    def look(self) -> None:
        """Play the profile's scenarios once more, and let the latency model follow."""
        from engine.profiling.measure import pooled  # noqa: PLC0415
        from engine.profiling.scenarios import scenarios  # noqa: PLC0415
        from envs.measured import fit  # noqa: PLC0415

        chosen = scenarios(
            pool_tokens=self._measurer.pool_tokens, max_model_len=self._loaded.config.max_model_len,
            max_tokens=_PROFILE_TOKENS, quick=self.context.quick,
        )  # fmt: skip
        self._looks.append(self._measurer.play(chosen))
        fitted = fit(pooled(list(self._looks)))
        self.model, self.fit_error_pct = fitted.model, 100 * fitted.steps.median

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
        """One trace, live several times with looks at the machine in between, and its simulation."""
        options, live = self.options(values), []
        for run in range(repeats):
            if run:  # before the first run there was one, that of the case before
                self.look()
            live.append(figures(self.live.run(trace, options, changes).records))
        self.look()
        records, _ = simulate(self.groups, self.model, trace, options, changes)
        return compare(live, figures(records))


def small(trace: Trace) -> Trace:
    """For a small model: shorter, and no longer than it takes."""
    small = scale(trace, Scaling(length_scale=_LENGTH_SCALE, max_requests=600, max_prompt_tokens=1500))
    return replace(small, requests=tuple(r for r in small.requests if r.prompt_tokens + r.output_tokens < 4000))
