"""Load from our own replay client in a thread of this process: arrivals at a rate that may change, until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.replay.client import Client
from autotune.replay.handshake import Server, learn
from autotune.replay.records import Outcome, RequestRecord
from autotune.replay.wire import Endpoint
from engine.clock import Clock
from envs.workload.trace import Trace, TraceRequest

_TIMEOUT_S = 120.0
_DRAIN_S = 60.0
_IDLE_S = 0.02  # how soon a rate of 0 is looked at again
_MOST_CONNECTIONS = 900


@dataclass(frozen=True)
class Load:
    """``rate``: arrivals per second at a time since the start, seconds; Poisson unless ``even``. Prompts and outputs
    are drawn evenly from the two ranges, tokens, both ends included.
    """

    rate: Callable[[float], float]
    prompts: tuple[int, int] = (60, 220)
    outputs: tuple[int, int] = (24, 96)
    even: bool = False


@dataclass(frozen=True)
class Failed:
    """A request that did not complete; nanoseconds of the monotonic clock."""

    sent_ns: int
    ended_ns: int
    kind: str
    message: str


@dataclass
class Tally:
    """What became of everything that was sent."""

    sent: int = 0
    completed: int = 0
    cancelled: int = 0  # still running when the load was stopped and its time to drain was over
    failed: list[Failed] = field(default_factory=list)


class Traffic:
    """Sends ``load`` to ``url`` between :meth:`start` and :meth:`stop`. The engine must answer when it starts."""

    def __init__(self, url: str, load: Load, clock: Clock, seed: int) -> None:
        self._url, self._load, self._clock = url, load, clock
        self._rng = random.Random(seed)
        self._seed = seed
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self.tally = Tally()
        """Grows meanwhile; whole once stopped."""
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def start(self) -> None:
        """Learn what the server is, then begin. Raises what went wrong in that."""
        self._thread.start()
        self._ready.wait()
        if self.error is not None:
            raise self.error

    def stop(self) -> Tally:
        """Send nothing more, wait for what is running, and say what became of it all."""
        self._stopping.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.tally

    def _run(self) -> None:
        try:
            asyncio.run(self._drive())
        except BaseException as error:  # noqa: BLE001  # told to who started it
            self.error = error
        finally:
            self._ready.set()

    async def _drive(self) -> None:
        endpoint = Endpoint.parse(self._url)
        client = Client(endpoint, self._clock, timeout_s=_TIMEOUT_S, max_connections=_MOST_CONNECTIONS)
        tasks: set[asyncio.Task[None]] = set()
        try:
            server = await learn(client, model=None)
            prompts = server.prompts(Trace("bench", ()), self._seed)
            self._ready.set()
            index, due_s = 0, client.now_s()
            while not self._stopping.is_set():
                rate = self._load.rate(client.now_s())
                if rate <= 0:
                    await asyncio.sleep(_IDLE_S)
                    due_s = client.now_s()
                    continue
                due_s += 1.0 / rate if self._load.even else self._rng.expovariate(rate)
                # In short sleeps, so that a stop or another rate is noticed; arrivals have no memory to be kept.
                while (left_s := due_s - client.now_s()) > 0 and self._load.rate(client.now_s()) == rate:
                    if self._stopping.is_set():
                        break
                    await asyncio.sleep(min(left_s, 0.05))
                if due_s > client.now_s():
                    due_s = client.now_s()
                    continue
                asked = TraceRequest(
                    0.0, self._rng.randint(*self._load.prompts), self._rng.randint(*self._load.outputs)
                )
                body = server.body(prompts, asked, index)
                task = asyncio.create_task(self._one(client, server, asked, index, body))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                index += 1
            if tasks:
                await asyncio.wait(tasks, timeout=_DRAIN_S)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
            client.close()

    async def _one(self, client: Client, server: Server, asked: TraceRequest, index: int, body: bytes) -> None:
        sent_s = client.now_s()
        record = RequestRecord(index, sent_s, asked.prompt_tokens, asked.output_tokens)
        self.tally.sent += 1
        try:
            await client.stream(record, body, exact_tokens=server.exact_tokens)
        finally:
            if record.outcome is Outcome.COMPLETED:
                self.tally.completed += 1
            elif record.outcome is Outcome.CANCELLED:
                self.tally.cancelled += 1
            else:
                start_ns = client.start_ns
                ended_s = client.now_s() if record.finished_s is None else record.finished_s
                self.tally.failed.append(
                    Failed(
                        start_ns + round(sent_s * 1e9), start_ns + round(ended_s * 1e9), record.failure, record.message
                    )
                )
