"""Benchmark of the simulator: how fast it is, and how true. ``python -m envs.bench_sim``; the last line is JSON.

Fidelity runs the bundled model on this machine, live and simulated, back to back; what else the machine does meanwhile
shows as the spread of live runs against each other, which is printed beside every error.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.tunable_state import Patch
from engine.tunables import TunableValue
from envs.arrivals_feed import StreamFeed, TraceFeed
from envs.fidelity import FIGURES, Comparison, at_rate, capacity_rps, compare, figures, kendall_tau, simulate
from envs.ledger import Ledger
from envs.profile import Profile, read_profile
from envs.signals import Targets
from envs.simulated import SimulatedEngine
from envs.simulator import SimOptions, Simulator
from envs.spaces import NOTHING
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import generate, stream
from envs.workload.loaders import load_trace
from envs.workload.scaling import Scaling, scale
from envs.workload.trace import Trace

if TYPE_CHECKING:
    from envs.live_run import LiveEngineRun

PROFILES: Final = Path(__file__).parent / "profiles"
MODEL: Final = Path("engine/bundled/model")
POOL_BYTES: Final = 24 << 20
ROWS: Final = ("speed", "env", "week", "fidelity", "tau")
_WEEK_RPS: Final = 1.0
# Prompts and outputs of big models' traces, for a small one.
_LENGTH_SCALE: Final = 8.0
_STATIC: Final[tuple[Mapping[str, TunableValue], ...]] = (
    {},
    {"kv_format": "int8"},
    {"kv_format": "int4", "block_size": 64},
    {"block_size": 256},
    {"max_num_seqs": 4},
    {"max_num_seqs": 16},
    {"max_num_batched_tokens": 64},
    {"max_num_batched_tokens": 2048},
)


@dataclass(frozen=True)
class Context:
    """What rows need. ``traces``: folder of public traces, None for generated ones alone."""

    model: Path
    traces: Path | None
    quick: bool
    log: Callable[[str], None]

    def trace(self, name: str, fallback: str, duration_s: float) -> Trace:
        """A public trace if its file is there, else a workload fitted to it."""
        path = None if self.traces is None else self.traces / f"{name}.csv.gz"
        if path is not None and path.is_file():
            return load_trace(path)
        return generate(CATALOGUE[fallback], duration_s=duration_s, seed=1)


def speed(context: Context) -> dict[str, Any]:
    """Simulated requests per second on one core: chat on an H200-like profile. Nothing is shared: no prefix cache."""
    profile = read_profile(PROFILES / "llama3_8b_h200_estimated.yaml")
    trace = context.trace("azure2023_conv_train", "chat-steady", 2100.0)
    if context.quick:
        trace = scale(trace, Scaling(max_requests=2000))
    values: dict[str, TunableValue] = {"block_size": 64, "max_num_batched_tokens": 2048, "max_num_seqs": 256}
    best, steps = 0.0, 0
    for _ in range(1 if context.quick else 3):
        options = SimOptions(
            profile.pool_bytes, profile.model.max_model_len, values=values, prefix_cache=trace.block_tokens > 0
        )
        feed, ledger = TraceFeed(trace), Ledger(Targets())
        simulator = Simulator(profile.groups(), profile.latency_model(), options, feed, ledger=ledger)
        gc.collect()
        begin_s = time.perf_counter()
        simulator.drain()
        best = max(best, len(trace.requests) / (time.perf_counter() - begin_s))
        steps = simulator.stats().counters.steps
    context.log(f"speed: {len(trace.requests)} requests of {trace.name}, {steps} steps: {best:.0f} requests/s")
    return {"sim_requests_per_s": best, "sim_trace": trace.name, "sim_steps": steps}


def env(context: Context) -> dict[str, Any]:
    """Steps of the default environment per second on one core, at its control interval of 2 s, changing nothing."""
    result: dict[str, Any] = {}
    for name, values in (("env_steps_per_s", {"block_size": 64}), ("env_steps_per_s_blocks_of_16", {})):
        one = SimulatedEngine(values=values)
        one.reset(seed=1)
        number = 60 if context.quick else 290
        begin_s = time.perf_counter()
        for _ in range(number):
            one.step(NOTHING)
        result[name] = number / (time.perf_counter() - begin_s)
    context.log(f"env: {', '.join(f'{value:.0f} {name}' for name, value in result.items())}")
    return result


def week(context: Context) -> dict[str, Any]:
    """A week of chat at the rate of a digitised week, thinned to what one L4 serves; memory at its start and end."""
    profile = read_profile(PROFILES / "llama3_8b_l4_estimated.yaml")
    days = 0.25 if context.quick else 7.0
    workload = CATALOGUE["chat-week"]
    make = partial(stream, workload, duration_s=days * 86400.0, seed=1, rate_scale=_WEEK_RPS / workload.mean_rps)
    feed = StreamFeed(make)
    values: dict[str, TunableValue] = {"block_size": 64}
    longest = profile.model.max_model_len
    options = SimOptions(profile.pool_bytes, longest, values=values, prefix_cache=False, max_waiting=10_000)
    simulator = Simulator(profile.groups(), profile.latency_model(), options, feed, ledger=Ledger(Targets()))
    begin_s, offered, resident = time.perf_counter(), 0, []
    for hour in range(1, round(24 * days) + 1):
        simulator.run_until(hour * 3600 * 10**9)
        offered += simulator.ledger.take().offered
        resident.append(_resident_bytes())
    wall_s = time.perf_counter() - begin_s
    grown = resident[-1] - resident[min(len(resident) - 1, 3)]
    context.log(f"week: {days:g} days, {offered} requests in {wall_s:.0f} s, memory grew by {grown / 1e6:.1f} MB")
    return {"week_days": days, "week_requests": offered, "week_wall_s": wall_s, "week_memory_growth_bytes": grown}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Bench:
    """A loaded model, its profile and its live engine: what the fidelity rows share."""

    def __init__(self, context: Context) -> None:
        import torch  # noqa: PLC0415

        from engine.loader import load_model  # noqa: PLC0415
        from envs.live_run import LiveEngineRun  # noqa: PLC0415

        # One thread: two would wait for whatever else runs on the machine.
        torch.set_num_threads(1)
        self.context = context
        self._loaded = load_model(context.model)
        self.live: LiveEngineRun = LiveEngineRun(self._loaded, POOL_BYTES)
        self.profile = self.measure()

    def measure(self) -> Profile:
        """The machine as it is now."""
        from envs.measured import measure_profile  # noqa: PLC0415

        self.context.log("measuring a profile")
        return measure_profile(self._loaded, pool_bytes=128 << 20, created="", versions={}, quick=self.context.quick)

    def options(self, values: Mapping[str, TunableValue]) -> SimOptions:
        longest = self.profile.model.max_model_len
        return SimOptions(POOL_BYTES, longest, values=dict(values), max_waiting=1 << 20, recode_share=0.15)

    def case(
        self,
        trace: Trace,
        values: Mapping[str, TunableValue],
        repeats: int,
        changes: Sequence[tuple[float, Patch]] = (),
    ) -> Comparison:
        """One trace, live several times and simulated once."""
        options = self.options(values)
        live = [figures(self.live.run(trace, options, changes).records) for _ in range(repeats)]
        records, _ = simulate(self.profile.groups(), self.profile.latency_model(), trace, options, changes)
        return compare(live, figures(records))


def fidelity(context: Context) -> dict[str, Any]:
    """Windows of traces at shares of capacity, native, int8 and int4, two block sizes, and one run with switches."""
    bench = Bench(context)
    seconds, repeats = (6.0, 2) if context.quick else (12.0, 5)
    shares = (0.5,) if context.quick else (0.5, 0.7, 0.85)
    sources = [("azure2023_conv_train", "chat-steady"), ("azure2023_code_train", "code-bursty")]
    if not context.quick:
        sources.append(("mooncake_conversation_train", "chat-shared-prefix"))
    settings: list[Mapping[str, TunableValue]] = [
        {}, {"kv_format": "int8", "block_size": 32}, {"kv_format": "int4", "block_size": 64},
    ]  # fmt: skip
    switches = [
        (0.3 * seconds, Patch({"kv_format": "int4"}, "bench")),
        (0.6 * seconds, Patch({"block_size": 64}, "bench")),
    ]
    rows: list[dict[str, Any]] = []
    for (name, fallback), share in itertools.product(sources, shares):
        base = _small(context.trace(name, fallback, 600.0))
        for index, values in enumerate([*settings, {}]):
            changes = switches if index == len(settings) else []
            if changes and share != shares[0]:
                continue
            model, groups = bench.profile.latency_model(), bench.profile.groups()
            rate = share * capacity_rps(groups, model, base, bench.options(values))
            trace = at_rate(base, rate, seconds)
            found = bench.case(trace, values, repeats, changes)
            what = {"trace": name, "share": share, "values": dict(values), "switches": bool(changes)}
            rows.append({**what, **vars(found)})
            errors = ", ".join(f"{f} {found.error_pct[f]:.1f} ({found.spread_pct[f]:.1f})" for f in FIGURES)
            how = f"{values or 'native'}{' and switches' if changes else ''}"
            context.log(f"fidelity: {name} at {share:.0%}, {how}: {errors}")
    result: dict[str, Any] = {
        f"{name}_err_pct": statistics.median(row["error_pct"][name] for row in rows) for name in FIGURES
    }
    result["live_spread_pct"] = {name: statistics.median(row["spread_pct"][name] for row in rows) for name in FIGURES}
    result["profile_error_pct"] = 100 * bench.profile.latency.steps.median if bench.profile.latency.steps else None
    result["fidelity_rows"] = rows
    return result


def tau(context: Context) -> dict[str, Any]:
    """Static settings by median E2E under one load: do live engine and simulation rank them alike?"""
    bench = Bench(context)
    base = _small(context.trace("azure2023_conv_train", "chat-steady", 600.0))
    rate = 0.8 * capacity_rps(bench.profile.groups(), bench.profile.latency_model(), base, bench.options({}))
    trace = at_rate(base, rate, 5.0 if context.quick else 12.0)
    live, simulated, spreads = [], [], []
    for values in _STATIC[:4] if context.quick else _STATIC:
        found = bench.case(trace, values, 2 if context.quick else 3)
        live.append(found.live["e2e"])
        simulated.append(found.simulated["e2e"])
        spreads.append(found.spread_pct["e2e"] / 100)
        one = f"live {live[-1]:.3f} s ({spreads[-1]:.1%}), simulated {simulated[-1]:.3f} s"
        context.log(f"tau: {values or 'default'}: {one}")
    value, pairs = kendall_tau(live, simulated, statistics.median(spreads))
    context.log(f"tau: {value} over {pairs} pairs")
    return {"kendall_tau": value, "kendall_pairs": pairs}


def _small(trace: Trace) -> Trace:
    """For a small model: shorter, and no longer than it takes."""
    small = scale(trace, Scaling(length_scale=_LENGTH_SCALE, max_requests=600, max_prompt_tokens=1500))
    return replace(small, requests=tuple(r for r in small.requests if r.prompt_tokens + r.output_tokens < 4000))


def main(argv: list[str] | None = None) -> int:
    """Entry of the command line."""
    parser = argparse.ArgumentParser(prog="python -m envs.bench_sim", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="comma separated (%(default)s)")
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder of the fidelity rows (%(default)s)")
    parser.add_argument("--traces", type=Path, help="folder of public traces; generated ones without")
    parser.add_argument("--quick", action="store_true", help="short: minutes in all")
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args(argv)
    wanted = [name for name in arguments.rows.split(",") if name]
    unknown = [name for name in wanted if name not in ROWS]
    if unknown:
        parser.error(f"unknown row {unknown[0]}; choose from {', '.join(ROWS)}")
    context = Context(arguments.model, arguments.traces, arguments.quick, lambda text: print(text, flush=True))
    rows: Mapping[str, Callable[[Context], dict[str, Any]]] = {
        "speed": speed, "env": env, "week": week, "fidelity": fidelity, "tau": tau,
    }  # fmt: skip
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "quick": arguments.quick,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    for name in wanted:
        result |= rows[name](context)
    line = json.dumps(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
