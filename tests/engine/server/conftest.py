"""An engine whose model is a function: real scheduler, cache, core and server; only the runner computes nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.cache_manager import CacheManager
from engine.clock import ManualClock, RealClock
from engine.core import EngineCore
from engine.core_options import CoreOptions
from engine.core_stats import CoreStats
from engine.events import NullSink
from engine.links import EmulatedMover
from engine.memory_model import GroupSpec
from engine.plan import RecodeBatch, SequenceOutput, StepPlan, TokenLogprobs
from engine.request import Request
from engine.scheduler import Scheduler
from engine.sdnotify import Notifier
from engine.serve import bind_tcp
from engine.server.control_socket import ControlSocket
from engine.server.intake import ServedModel
from engine.server.run import ServerOptions, run_servers
from engine.stats import Counters
from engine.token_bytes import byte_alphabet, detokenizer_factory
from engine.tokenizer import ModelTokenizer
from engine.transfers import HostLink
from engine.tunables import default_values
from kernels.layout import KVShape

BOS, EOS, VOCAB = 256, 257, 258
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot: {% endif %}"
)
SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, element_bytes=2)
TOKEN_BYTES = 32
WORK = {"kv_bytes_read": 1000, "kv_bytes_written": 10, "host_bytes_read": 0, "host_wait_ns": 0}
NextToken = Callable[[Request], int]


def printable(request: Request) -> int:
    """A token that depends on every token before it, so that lost or repeated context shows."""
    state = 17
    for token_id in request.all_ids:
        state = (state * 31 + token_id + 1) % 65521
    return 97 + state % 26


def scripted(text: str) -> NextToken:
    """The bytes of a text, then the end token."""
    ids = [*text.encode(), EOS]
    return lambda request: ids[min(len(request.output_ids), len(ids) - 1)]


@dataclass
class FakeRunner:
    """Ids from ``next_token``; log-probabilities made up but fixed. ``before`` runs at the start of every step."""

    next_token: NextToken = printable
    before: Callable[[StepPlan], None] = lambda _plan: None
    plans: list[StepPlan] = field(default_factory=list)
    recoded: list[RecodeBatch] = field(default_factory=list)
    last_work: Any = field(default_factory=lambda: SimpleNamespace(**WORK))

    def recode(self, batches: Sequence[RecodeBatch]) -> None:
        self.recoded += batches

    def execute(self, plan: StepPlan, cache: CacheManager) -> list[SequenceOutput]:
        self.plans.append(plan)
        self.before(plan)
        return [self._output(sequence, cache) for sequence in plan.sequences]

    def _output(self, sequence: Any, cache: CacheManager) -> SequenceOutput:
        request = sequence.request
        end = sequence.start + sequence.num_tokens
        entries = cache.entries(request, 0)
        assert entries[-1].first + entries[-1].valid >= end, "tokens without slots"
        output = SequenceOutput(request)
        if sequence.samples:
            output.token_id = self.next_token(request)
            if request.params.logprobs is not None:
                output.logprobs = self._logprobs(output.token_id, request.params.logprobs)
        if request.params.prompt_logprobs is not None:
            for token_id in request.prompt_ids[sequence.start + 1 : end + 1]:
                row = self._logprobs(token_id, request.params.prompt_logprobs)
                output.prompt_logprobs = [*output.prompt_logprobs, row]
        return output

    @staticmethod
    def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
        top = tuple((97 + i, -0.5 - i) for i in range(num_top))
        return TokenLogprobs(token_id, -0.25, 1, top)


@dataclass
class Engine:
    """Everything a test may want to look at."""

    core: EngineCore
    scheduler: Scheduler
    cache: CacheManager
    runner: FakeRunner
    stats: CoreStats
    clock: Any


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of one token per byte, two special tokens and a chat template; no weights."""
    folder = tmp_path_factory.mktemp("model") / "bytes"
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def served(model_folder: Path) -> ServedModel:
    tokenizer = ModelTokenizer(model_folder)
    return ServedModel(
        "bytes", tokenizer, VOCAB, 1024, frozenset({EOS}), detokenizer_factory(model_folder, tokenizer.decode), 1
    )


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Engine]]:
    """A factory; afterwards every engine's bookkeeping must be consistent."""
    made: list[Engine] = []

    def build(
        *,
        next_token: NextToken = printable,
        pool_tokens: int = 8192,
        max_model_len: int = 1024,
        max_waiting: int = 64,
        real_clock: bool = False,
        recent_tokens: int = 32,
        watermark: float = 0.0,
        core_options: dict[str, Any] | None = None,
        host_pool_tokens: int = 0,
        link_bytes_per_s: float = 1e6,
        **values: Any,
    ) -> Engine:
        clock = RealClock() if real_clock else ManualClock(start_ns=5_000_000_000)
        settings = {**default_values(), **values}
        counters = Counters()
        cache = CacheManager(
            [GroupSpec("full", (0,), SHAPE)],
            pool_tokens * TOKEN_BYTES,
            settings,
            recent_tokens=recent_tokens,
            sinks=16,
            watermark=watermark,
            clock=clock,
            events=NullSink(),
            counters=counters,
            host_pool_bytes=host_pool_tokens * TOKEN_BYTES,
            link=HostLink(link_bytes_per_s, link_bytes_per_s) if host_pool_tokens else None,
        )
        nothing = [torch.empty(0, dtype=torch.uint8)]
        mover = EmulatedMover(nothing, nothing, cache.link, clock, lambda *_: None) if cache.link else None
        stats = CoreStats(counters)
        scheduler = Scheduler(
            cache,
            settings,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            clock=clock,
            counters=counters,
            eos_token_ids=frozenset({EOS}),
        )
        runner = FakeRunner(next_token)
        options = CoreOptions("bytes", "instance-1", max_model_len, **(core_options or {}))
        core = EngineCore(scheduler, cache, runner, settings, clock, options=options, stats=stats, mover=mover)
        made.append(Engine(core, scheduler, cache, runner, stats, clock))
        return made[-1]

    yield build
    for engine in made:
        engine.cache.check_integrity()


class LiveServer:
    """A real server on an ephemeral port, its event loop in a thread of its own."""

    def __init__(
        self,
        engine: Engine,
        served: ServedModel,
        control_path: Path,
        options: ServerOptions,
        notifier: Notifier | None = None,
    ) -> None:
        self.engine = engine
        self.control_path = control_path
        listener = bind_tcp("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._control = ControlSocket(control_path)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await run_servers(
                engine.core, served, engine.clock, listener, self._control.socket, self._stop, options,
                on_ready=self._ready.set, notifier=notifier,
            )  # fmt: skip

        self._thread = threading.Thread(target=lambda: asyncio.run(main()))
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        if self._thread.is_alive():
            assert self._loop is not None
            assert self._stop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(60)
            assert not self._thread.is_alive()
        self._control.close()


@pytest.fixture
def serve(
    new_engine: Callable[..., Engine], served: ServedModel, tmp_path: Path
) -> Iterator[Callable[..., LiveServer]]:
    """A factory of live servers; arguments are the engine's, ``server`` options and a ``notifier``."""
    made: list[LiveServer] = []

    def start(*, server: ServerOptions | None = None, notifier: Notifier | None = None, **engine: Any) -> LiveServer:
        built = new_engine(real_clock=True, **engine)
        options = server or ServerOptions(grace_s=0)
        made.append(LiveServer(built, served, tmp_path / f"{len(made)}.sock", options, notifier))
        return made[-1]

    yield start
    for server in made:
        server.stop()
