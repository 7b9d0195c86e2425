"""The demonstration from start to end: measure, size, replay with tuning and without, compare.

Everything that it starts is stopped again, whatever happens; Ctrl-C ends it at any moment with exit code 130, another
signal with 128 and its number.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from autotune.child import SupervisorError
from autotune.demo.afterwards import how_to_look
from autotune.demo.decision_lines import EXPLAINED, DecisionLines
from autotune.demo.foretell import Foretold, foretell
from autotune.demo.load import kv_memory, sized_traces
from autotune.demo.options import DemoError, DemoOptions
from autotune.demo.probe import ProbeError, measure
from autotune.demo.report import Arm, comparison, load_lines, machine_lines, print_lines, result
from autotune.demo.run_folder import RunFolderError, run_folder
from autotune.demo.sides import Side
from autotune.demo.sides_view import sides_table
from autotune.demo.sizing import Rates, SizedLoad
from autotune.demo.stack import EngineSpec
from autotune.demo.stacks import Stacks
from autotune.demo.stopping import Interrupted, Stopping
from autotune.demo.verdict import verdict
from autotune.demo.watch import Watcher
from autotune.replay.handshake import ServerError, learn
from autotune.replay.session import run_session
from autotune.replay.summary import Targets
from autotune.waiting import waiting
from engine.clock import Clock
from engine.control_client import EngineUnreachable
from engine.errors import EngineError
from envs.signals import Targets as SimulatedTargets
from envs.workload.catalogue import CATALOGUE
from envs.workload.trace import Trace

ARMS_ABREAST = 4  # columns that fit a terminal
_MAX_WAITING = ("--max-waiting", "100000")  # a full queue is a latency to be measured here, not an error


def run_demo(options: DemoOptions, clock: Clock, console: Console) -> int:
    """Run it; returns the exit code. The last line on the console is the result as one JSON object.

    Raises DemoError.
    """
    try:
        with run_folder(options.run_folder) as folder:
            demo = _Demo(options, folder.path, keeps=folder.keep, clock=clock, console=console)
            try:
                document = asyncio.run(demo.run())
            except Interrupted:
                console.print("stopped", highlight=False)
                return 128 + demo.stopping.signal
            except (SupervisorError, ServerError, ProbeError, EngineUnreachable, OSError, ValueError) as error:
                folder.keep = True
                raise DemoError(f"{_text(error)} (logs: {folder.path})") from error
    except (OSError, RunFolderError) as error:
        raise DemoError(_text(error)) from error
    console.file.write(json.dumps(document) + "\n")
    console.file.flush()
    return 0 if document["requests_completed"] else 1


def _text(error: Exception) -> str:
    """Of a file's trouble, which file and what."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
    return str(error)


class _Demo:
    """``keeps``: whether the folder is there afterwards."""

    def __init__(self, options: DemoOptions, folder: Path, *, keeps: bool, clock: Clock, console: Console) -> None:
        self.stopping = Stopping()
        self._options = options
        self._keeps = keeps
        self._clock = clock
        self._console = console
        self._stacks = Stacks(folder, self.stopping, clock, console, self._say)
        self._sides = options.sides

    async def run(self) -> dict[str, Any]:
        self.stopping.listen()
        options = self._options
        engine = EngineSpec(options.model, options.device, options.dtype, extra=_MAX_WAITING, program=options.program)
        first = "a first start compiles kernels, a minute or two"
        self._say(f"1. Measuring what this machine sustains ({options.model.name}; {first})")
        try:
            memory = kv_memory(options.model, options.dtype)
        except EngineError as error:
            raise DemoError(str(error)) from error
        rates = await self._measure(engine)
        print_lines(self._console, machine_lines(rates))
        load, traces = sized_traces(
            CATALOGUE[options.workload], rates, memory,
            duration_s=options.duration_s, number=options.pairs, seed=options.seed,
        )  # fmt: skip
        self._say("2. The load")
        explained = [*options.notes, EXPLAINED] if any(one.is_tuned for one in self._sides) else []
        print_lines(self._console, [*load_lines(load, traces[0]), *explained])
        engine = replace(engine, pool_bytes=load.pool_bytes)
        arms: list[Arm] = []
        for turns, trace in enumerate(traces):
            # Every round begins with another side, so that a drift of the machine does not favour one.
            turn = turns % len(self._sides)
            for one in (*self._sides[turn:], *self._sides[:turn]):
                several = f" ({'pair' if len(self._sides) == 2 else 'round'} {turns + 1})" if len(traces) > 1 else ""
                self._say(f"{3 + len(arms)}. Replay, {one.description}{several}")
                arms.append(await self._replay(trace, engine, load, one))
        for start in range(0, len(arms), ARMS_ABREAST):
            self._console.print(comparison(arms[start : start + ARMS_ABREAST]))
        document = result(arms, load, rates, self._sides, await self._foretell(traces, load))
        if len(self._sides) > 2 or options.profile is not None:
            self._console.print(sides_table(document["sides"]))
        for line in (*verdict(arms, self._sides), *how_to_look(arms, options.called)):
            self._say(line)
        return document

    async def _foretell(self, traces: list[Trace], load: SizedLoad) -> dict[str, Foretold]:
        profile, settle_s = self._options.profile, self._options.settle_s
        if profile is None:
            return {}
        self._say("What the simulator says of it")

        def simulate() -> dict[str, Foretold]:
            return foretell(
                self._sides,
                traces,
                profile,
                pool_bytes=load.pool_bytes,
                targets=SimulatedTargets(load.ttft_target_s, load.tbt_target_s),
                settle_s=settle_s,
                progress=self._say,
            )

        return await self.stopping.unless_stopped(asyncio.to_thread(simulate))

    async def _measure(self, engine: EngineSpec) -> Rates:
        async with self._stacks.start(engine) as (_, client):
            with waiting(self._console, "  measuring prefill and decode"):
                server = await self.stopping.unless_stopped(learn(client, model=None))
                return await self.stopping.unless_stopped(measure(client, server))

    async def _replay(self, trace: Trace, engine: EngineSpec, load: SizedLoad, one: Side) -> Arm:
        targets = Targets(load.ttft_target_s, load.tbt_target_s)
        engine = replace(engine, extra=(*engine.extra, *one.engine_options))
        async with self._stacks.start(engine, load, one) as (stack, client):
            server = await self.stopping.unless_stopped(learn(client, model=None))
            lines = DecisionLines(self._say)
            watcher = Watcher(stack, lines.show)
            watcher.start()
            try:
                if one.is_tuned:
                    await self.stopping.unless_stopped(asyncio.sleep(self._options.settle_s))
                lines.began_wall_s = self._clock.wall_s()
                outcome = await run_session(
                    trace,
                    client,
                    server,
                    targets,
                    stop=self.stopping.event,
                    seed=self._options.seed,
                    console=self._console,
                    title="daemon on" if one.is_tuned else "daemon off",
                )
            finally:
                seen = await asyncio.to_thread(watcher.stop)
                lines.end()
        if outcome.progress.stopped:
            raise Interrupted
        self.stopping.check()
        return Arm(one, outcome.summary, seen, stack.journal if one.is_tuned and self._keeps else None)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
