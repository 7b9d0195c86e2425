"""The demonstration from start to end: measure, size, replay with tuning and without, compare.

Everything that it starts is stopped again, whatever happens; Ctrl-C ends it at any moment with exit code 130, another
signal with 128 and its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from autotune.child import SupervisorError
from autotune.demo.afterwards import how_to_look
from autotune.demo.decision_lines import EXPLAINED, DecisionLines
from autotune.demo.foretell import Foretold, foretell
from autotune.demo.load import kv_memory, sized_traces
from autotune.demo.probe import ProbeError, measure
from autotune.demo.report import Arm, comparison, load_lines, machine_lines, print_lines, result
from autotune.demo.run_folder import RunFolderError, run_folder
from autotune.demo.sides import DEFAULT_SIDES, Side
from autotune.demo.sides_view import sides_table
from autotune.demo.sizing import Rates, SizedLoad
from autotune.demo.stack import VERBS, EngineSpec, Stack, daemon_config, new_stack, supervisor
from autotune.demo.verdict import verdict
from autotune.demo.watch import Watcher
from autotune.replay.client import Client
from autotune.replay.handshake import ServerError, learn
from autotune.replay.runner import connection_bound
from autotune.replay.session import run_session
from autotune.replay.summary import Targets
from autotune.replay.wire import Endpoint
from autotune.supervisor import Supervisor
from autotune.waiting import waiting
from engine.clock import Clock
from engine.control_client import EngineUnreachable
from envs.profile import Profile
from envs.signals import Targets as SimulatedTargets
from envs.workload.catalogue import CATALOGUE
from envs.workload.trace import Trace

# The daemon does nothing before it has seen one whole window; until then the start of a load would run as if untuned.
SETTLE_S = 9.0
READY_S = 900.0  # the first start compiles kernels, which takes a slow machine minutes
REQUEST_TIMEOUT_S = 300.0
ARMS_ABREAST = 4  # columns that fit a terminal
STARVED = (
    "if this machine has little processor time to spare, stop what runs beside it and start again: "
    "kernels that have been compiled are kept"
)
T = TypeVar("T")
_MAX_WAITING = ("--max-waiting", "100000")  # a full queue is a latency to be measured here, not an error


class DemoError(Exception):
    """The demonstration cannot go on; one line."""


class _Interrupted(Exception):  # noqa: N818  # a wish of the user's, not an error
    pass


@dataclass(frozen=True)
class DemoOptions:
    """What to demonstrate.

    ``sides``: what every round is replayed under, the one to be shown first; at least two. ``profile``: of this model
    on this machine, with which the simulator then says how the sides should have compared. ``notes``: said with the
    load. ``run_folder`` None: a temporary one, removed at the end unless something failed; one that is named holds the
    last demonstration. ``called``: how this program is called, as words.
    """

    model: Path
    device: str = "auto"
    dtype: str = "auto"
    pairs: int = 1
    duration_s: float = 90.0
    workload: str = "reasoning-bursty"
    sides: tuple[Side, ...] = DEFAULT_SIDES
    profile: Profile | None = None
    seed: int = 1
    notes: tuple[str, ...] = ()
    run_folder: Path | None = None
    called: tuple[str, ...] = ("autotune",)
    program: tuple[str, ...] = VERBS  # what runs the verb `engine`
    settle_s: float = SETTLE_S


def run_demo(options: DemoOptions, clock: Clock, console: Console) -> int:
    """Run it; returns the exit code. The last line on the console is the result as one JSON object.

    Raises DemoError.
    """
    try:
        with run_folder(options.run_folder) as folder:
            demo = _Demo(options, folder.path, keeps=folder.keep, clock=clock, console=console)
            try:
                document = asyncio.run(demo.run())
            except _Interrupted:
                console.print("stopped", highlight=False)
                return 128 + demo.signal
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
        self.signal = signal.SIGINT  # the first one that came
        self._options = options
        self._folder = folder
        self._keeps = keeps
        self._clock = clock
        self._console = console
        self._stop = asyncio.Event()
        self._running: Supervisor | None = None
        self._stacks = 0
        self._sides = options.sides

    async def run(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt, number)
        options = self._options
        engine = EngineSpec(options.model, options.device, options.dtype, extra=_MAX_WAITING, program=options.program)
        first = "a first start compiles kernels, a minute or two"
        self._say(f"1. Measuring what this machine sustains ({options.model.name}; {first})")
        try:
            memory = kv_memory(options.model, options.dtype)
        except ValueError as error:
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

        return await self._unless_stopped(asyncio.to_thread(simulate))

    async def _measure(self, engine: EngineSpec) -> Rates:
        async with self._stack(engine) as stack, _client(stack, self._clock) as client:
            with waiting(self._console, "  measuring prefill and decode"):
                server = await self._unless_stopped(learn(client, model=None))
                return await self._unless_stopped(measure(client, server))

    async def _replay(self, trace: Trace, engine: EngineSpec, load: SizedLoad, one: Side) -> Arm:
        targets = Targets(load.ttft_target_s, load.tbt_target_s)
        engine = replace(engine, extra=(*engine.extra, *one.engine_options))
        async with self._stack(engine, load, one) as stack, _client(stack, self._clock) as client:
            server = await self._unless_stopped(learn(client, model=None))
            lines = DecisionLines(self._say)
            watcher = Watcher(stack, lines.show)
            watcher.start()
            try:
                if one.is_tuned:
                    await self._unless_stopped(asyncio.sleep(self._options.settle_s))
                lines.began_wall_s = self._clock.wall_s()
                outcome = await run_session(
                    trace,
                    client,
                    server,
                    targets,
                    stop=self._stop,
                    seed=self._options.seed,
                    console=self._console,
                    title="daemon on" if one.is_tuned else "daemon off",
                )
            finally:
                seen = await asyncio.to_thread(watcher.stop)
                lines.end()
        if outcome.progress.stopped or self._stop.is_set():
            raise _Interrupted
        return Arm(one, outcome.summary, seen, stack.journal if one.is_tuned and self._keeps else None)

    @contextlib.asynccontextmanager
    async def _stack(
        self, engine: EngineSpec, load: SizedLoad | None = None, one: Side | None = None
    ) -> AsyncIterator[Stack]:
        """A running engine, and a daemon when there are a load and a policy to tune it by; both gone afterwards."""
        self._stacks += 1
        stack = new_stack(self._folder / f"{self._stacks}", tuned=one is not None and one.is_tuned)
        config = None
        if load is not None and one is not None and one.policy is not None:
            config = daemon_config(
                stack,
                ttft_target_s=load.ttft_target_s,
                tbt_target_s=load.tbt_target_s,
                policy=dict(one.policy),
            )
        children = supervisor(stack, engine, config, self._clock, report=self._say)
        self._running = children
        try:
            if self._stop.is_set():
                raise _Interrupted
            still = "compiling kernels for this processor" if self._stacks == 1 else "starting"
            with waiting(self._console, f"  starting the engine{' and the daemon' if config else ''}", f"  {still}"):
                await asyncio.to_thread(_start, children)
            if self._stop.is_set():
                raise _Interrupted
            yield stack
        except SupervisorError:
            if self._stop.is_set():
                raise _Interrupted from None
            raise
        finally:
            self._running = None
            await asyncio.to_thread(children.stop)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise _Interrupted
        return task.result()

    def _interrupt(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            self.signal = number
        self._stop.set()
        if self._running is not None:
            self._running.request_stop()

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _start(children: Supervisor) -> None:
    children.start()
    children.wait_ready(READY_S, STARVED)


@contextlib.asynccontextmanager
async def _client(stack: Stack, clock: Clock) -> AsyncIterator[Client]:
    client = Client(
        Endpoint.parse(stack.url), clock, timeout_s=REQUEST_TIMEOUT_S, max_connections=connection_bound(4096)
    )
    try:
        yield client
    finally:
        client.close()


def bundled_model() -> Path:
    """The model that comes with the engine. Found without importing torch."""
    return _package("engine") / "bundled" / "model"


def bundled_profile(model: Path) -> Path | None:
    """The profile that comes with the bundled model: what settings lose on it, whatever machine this is. None for any
    other model, and where none has come with it.
    """
    path = _package("envs") / "profiles" / "bundled_cpu.yaml"
    return path if path.is_file() and model.resolve() == bundled_model().resolve() else None


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise DemoError(f"the package `{name}` is not installed")
    return Path(spec.origin).parent
