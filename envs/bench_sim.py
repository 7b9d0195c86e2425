"""Benchmark of the simulator: how fast it is, and how true. ``python -m envs.bench_sim``; the last line is JSON.

Speeds are per second of one core's own time (one process, one thread), so that a busy machine does not show in them.
Fidelity runs the bundled model on this machine, live and simulated, back to back, on one thread. With ``--clock cpu``
time is the processor's work for this process (see :mod:`envs.live_run`), with ``wall`` the machine's. A shared machine
is now fast, now slow, so the profile's loads are played between the live runs, and the simulation has the latency model
of those around it. What else the machine does shows as the spread of live runs, printed beside every error.
"""

from __future__ import annotations

import gc
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from engine.bench_frame import bench_parser, conclude, log
from engine.tunable_state import Patch
from engine.tunables import TunableValue
from envs.arrivals_feed import StreamFeed, TraceFeed
from envs.bench_context import MODEL, PROFILES, Bench, Context, small
from envs.bench_exact import capacity, hits, shaken
from envs.fidelity import FIGURES, at_rate, capacity_rps, kendall_tau
from envs.ledger import Ledger
from envs.profile import read_profile
from envs.signals import Targets
from envs.simulated import SimulatedEngine
from envs.simulator import SimOptions, Simulator
from envs.spaces import NOTHING
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import stream
from envs.workload.scaling import Scaling, scale

_WEEK_RPS: Final = 1.0
_SATURATED: Final = 1.3  # times capacity
_TAU_POOL_BYTES: Final = 4 << 20
# Far beyond capacity, times are work. Just beyond it they are what little is left over, and 3 % of the machine's speed
# are half of them.
_TAU_SHARE: Final = 3.0
_STATIC: Final[tuple[Mapping[str, TunableValue], ...]] = (
    {},
    {"kv_format": "int4", "block_size": 64},
    {"max_num_seqs": 4},
    {"block_size": 256},
    {"kv_format": "int8", "block_size": 32},
    {"kv_format": "int4", "block_size": 256},
    {"max_num_seqs": 2},
    {"max_num_batched_tokens": 64},
)


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
        begin_s = time.process_time()
        simulator.drain()
        best = max(best, len(trace.requests) / (time.process_time() - begin_s))
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
        begin_s = time.process_time()
        for _ in range(number):
            one.step(NOTHING)
        result[name] = number / (time.process_time() - begin_s)
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
    begin_s, offered, resident = time.process_time(), 0, []
    for hour in range(1, round(24 * days) + 1):
        simulator.run_until(hour * 3600 * 10**9)
        offered += simulator.ledger.take().offered
        resident.append(_resident_bytes())
    cpu_s = time.process_time() - begin_s
    grown = resident[-1] - resident[min(len(resident) - 1, 3)]
    by_day_mb = [round(size / 1e6, 1) for size in resident[23::24]]
    context.log(f"week: {days:g} days, {offered} requests, {cpu_s:.0f} s of a core, memory +{grown / 1e6:.1f} MB")
    context.log(f"week: MB resident at the end of each day: {by_day_mb}")
    return {
        "week_resident_mb_by_day": by_day_mb,
        "week_days": days,
        "week_requests": offered,
        "week_cpu_s": cpu_s,
        "week_memory_growth_bytes": grown,
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


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
        base = small(context.trace(name, fallback, 600.0))
        for index, values in enumerate([*settings, {}]):
            changes = switches if index == len(settings) else []
            if changes and share != shares[0]:
                continue
            rate = share * capacity_rps(bench.groups, bench.model, base, bench.options(values))
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
    result["saturated_throughput_err_pct"] = _saturated(bench, sources, seconds, repeats)
    result["live_spread_pct"] = {name: statistics.median(row["spread_pct"][name] for row in rows) for name in FIGURES}
    result["profile_error_pct"] = bench.fit_error_pct
    result["fidelity_rows"] = rows
    return result


def _saturated(bench: Bench, sources: Sequence[tuple[str, str]], seconds: float, repeats: int) -> float:
    """Median error of the throughput past saturation, where latencies only say how long the run was."""
    errors = []
    for name, fallback in sources[:1] if bench.context.quick else sources:
        base = small(bench.context.trace(name, fallback, 600.0))
        rate = _SATURATED * capacity_rps(bench.groups, bench.model, base, bench.options({}))
        found = bench.case(at_rate(base, rate, seconds), {}, repeats)
        errors.append(found.error_pct["throughput"])
        spread = found.spread_pct["throughput"]
        bench.context.log(f"fidelity: {name} at {_SATURATED:.0%}: throughput {errors[-1]:.1f} ({spread:.1f})")
    return statistics.median(errors)


def tau(context: Context) -> dict[str, Any]:
    """Static settings by mean E2E far beyond the capacity of a small pool, where they matter: do live engine and
    simulation rank them alike?
    """
    bench = Bench(context, _TAU_POOL_BYTES)
    base = small(context.trace("servegen_deepseek-r1_GENERATED_1h", "reasoning-bursty", 600.0))
    rate = _TAU_SHARE * capacity_rps(bench.groups, bench.model, base, bench.options({}))
    trace = at_rate(base, rate, 2.0 if context.quick else 4.0)
    live, simulated, spreads = [], [], []
    for values in _STATIC[:4] if context.quick else _STATIC:
        found = bench.case(trace, values, 2 if context.quick else 5)
        live.append(found.live["e2e_mean"])
        simulated.append(found.simulated["e2e_mean"])
        spreads.append(found.spread_pct["e2e_mean"] / 100)
        one = f"live {live[-1]:.3f} s ({spreads[-1]:.1%}), simulated {simulated[-1]:.3f} s"
        context.log(f"tau: {values or 'default'}: {one}")
    value, pairs = kendall_tau(live, simulated, spreads)
    context.log(f"tau: {value} over {pairs} pairs")
    rows = [dict(values) for values in _STATIC[: len(live)]]
    return {
        "kendall_tau": value,
        "kendall_pairs": pairs,
        "kendall_rows": [
            {"values": v, "live_s": a, "spread": c, "simulated_s": b}
            for v, a, b, c in zip(rows, live, simulated, spreads, strict=True)
        ],
    }


ROWS: Final[Mapping[str, Callable[[Context], dict[str, Any]]]] = {
    "speed": speed, "env": env, "week": week, "fidelity": fidelity, "tau": tau, "capacity": capacity, "hits": hits,
    "shake": shaken,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Entry of the command line."""
    parser = bench_parser("envs.bench_sim", __doc__, list(ROWS))
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder of the fidelity rows (%(default)s)")
    parser.add_argument("--traces", type=Path, help="folder of public traces; generated ones without")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="of the fidelity rows (%(default)s)")
    parser.add_argument("--shake-steps", type=int, default=1_000_000, help="random actions of row shake (%(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="that row shake uses (%(default)s)")
    arguments = parser.parse_args(argv)
    context = Context(
        arguments.model,
        arguments.traces,
        arguments.quick,
        arguments.clock == "cpu",
        arguments.shake_steps,
        arguments.processes,
        log,
    )
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "quick": arguments.quick,
        "clock": arguments.clock,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    for name in arguments.rows:
        result |= ROWS[name](context)
    conclude(result, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
