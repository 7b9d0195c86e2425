"""Live switches under a running batch: what must not change does not change by a bit, what may stays small."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loader import LoadedModel, load_model
from engine.memory_model import slab_bytes
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine, generate
from engine.plan import StepPlan
from engine.request import CachePolicy, Request, SamplingParams
from engine.transfers import HostLink
from engine.tunables import TUNABLES
from kernels import ops
from kernels.layout import BLOCK_SIZES, FORMATS

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "use_sliding_window": True,
    "sliding_window": 50,
    "max_window_layers": 2,
}
NEW_TOKENS = 40
# Knobs that change neither what is stored, in position order, nor logits, for the same batch composition.
LOSSLESS = [name for name in ("block_size", "prefix_eviction", "host_offload") if name in TUNABLES]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("switches") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=5, deviation=0.15), dtype=request.param)


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(128) for _ in range(length)] for length in lengths or (340, 37, 5, 96)]


def engine_of(loaded: LoadedModel, *, budget: int | None = None, num_slabs: int = 40, **values: Any) -> OfflineEngine:
    """``budget``: tokens recoded per step; None for all that is due."""
    slab = sum(slab_bytes(group.shape, 256) for group in loaded.groups)
    engine = OfflineEngine(
        loaded,
        pool_bytes=num_slabs * slab,
        values={"max_num_batched_tokens": 64, **values},
        recent_tokens=32,
        sync_recode=budget is None,
        host_pool_bytes=20 * slab,
        link=HostLink(1e9, 1e9),
    )
    if budget is not None:
        engine.scheduler.set_recode_budget(budget)
    return engine


def stored(engine: OfflineEngine, request: Request) -> list[Tensor]:
    """Positions, keys and values of a request, every layer, in position order, as far as the model's window shows.

    Behind the window whole blocks are dropped, so how much is still there depends on their size.
    """
    tensors = []
    for number, group in enumerate(engine.loaded.groups):
        entries = engine.cache.entries(request, number)
        assert all(a.first + a.valid <= b.first for a, b in pairwise(entries))
        rows = torch.tensor([[e.offset, e.format_code, e.first, e.valid] for e in entries], dtype=torch.int32)
        positions = [p for e in entries for p in range(e.first, e.first + e.valid)]
        shown = group.window - 1 if group.window else len(positions)  # the next query is one of the window
        tensors.append(torch.tensor(positions[-shown:]))
        arena, dtype = engine.runner.arenas[number], engine.loaded.model.dtype
        for layer in range(group.shape.num_layers):
            pair = ops.gather_kv(arena, group.shape, layer, rows, len(rows), native_dtype=dtype)
            tensors += [tensor[-shown:] for tensor in pair]
    return tensors


def record(
    engine: OfflineEngine,
    between: Callable[[OfflineEngine, int], None],
    given: list[list[int]] | None = None,
    *,
    new_tokens: int = NEW_TOKENS,
) -> list[list[Tensor]]:
    """Run the prompts to the end; per step the logits, then the stored KV of every running request."""
    steps: list[list[Tensor]] = []
    model = engine.loaded.model
    original = model.logits
    current: list[Tensor] = []

    def spy(hidden: Tensor) -> Tensor:
        logits = original(hidden)
        current.append(logits.clone())
        return logits

    def after(_plan: StepPlan) -> None:
        live = [tensor for request in engine.scheduler.running for tensor in stored(engine, request)]
        steps.append([*current, *live])
        current.clear()
        engine.cache.check_integrity()
        between(engine, len(steps))

    model.logits = spy  # type: ignore[method-assign]
    try:
        for prompt in given or prompts():
            engine.add(prompt, SamplingParams(max_tokens=new_tokens))
        engine.run(after)
    finally:
        model.logits = original  # type: ignore[method-assign]
    return steps


def nothing(_engine: OfflineEngine, _step: int) -> None:
    """Switch nothing."""


def assert_same_bits(expected: list[list[Tensor]], found: list[list[Tensor]]) -> None:
    assert len(expected) == len(found)
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert len(one) == len(other), step
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), step


def classes(engine: OfflineEngine) -> set[tuple[str, int]]:
    return {(row.kv_format, row.block_size) for row in engine.cache.resident()}


@pytest.mark.parametrize("knob", LOSSLESS)
@pytest.mark.parametrize("budget", [None, 32], ids=["at once", "bit by bit"])
def test_lossless_switches_at_every_step_change_no_bit(loaded: LoadedModel, knob: str, budget: int | None) -> None:
    """``budget``: tokens recoded per step, so that most steps run in the middle of a change."""
    values, seen = TUNABLES[knob].values, set()
    stride = 2 if len(values) % 2 else 1  # of no common divisor with the number of values: all of them come up

    def switch(engine: OfflineEngine, step: int) -> None:
        seen.add(values[step * stride % len(values)])
        sizes.update(size for _, size in classes(engine))
        engine.apply(**{knob: values[step * stride % len(values)]})

    sizes: set[int] = set()
    plain = record(engine_of(loaded, budget=budget), nothing)
    assert_same_bits(plain, record(engine_of(loaded, budget=budget), switch))
    assert seen == set(values)
    assert knob != "block_size" or sizes >= set(BLOCK_SIZES), "the switches did nothing"


@pytest.mark.parametrize("budget", [None, 32], ids=["at once", "bit by bit"])
def test_block_size_switches_change_no_bit_under_eviction(loaded: LoadedModel, budget: int | None) -> None:
    """What attention is reported, what it makes stay, and where that lies in its blocks."""
    values = {"eviction": "heavy_hitter", "keep_tokens": 128}
    sizes: set[int] = set()

    def switch(engine: OfflineEngine, step: int) -> None:
        sizes.update(size for _, size in classes(engine))
        engine.apply(block_size=BLOCK_SIZES[step * 2 % 5])

    engine = engine_of(loaded, budget=budget, **values)
    assert_same_bits(record(engine, nothing), record(engine_of(loaded, budget=budget, **values), switch))
    assert sizes >= set(BLOCK_SIZES)
    assert engine.cache.counters.evicted_by_attention_tokens > 150


@pytest.mark.parametrize("knob", LOSSLESS)
def test_one_lossless_switch_at_any_step_changes_no_bit(loaded: LoadedModel, knob: str) -> None:
    """From the first chunk of the prompt to the last token, from the middle value to each of the others in turn."""
    (prompt,) = prompts(150)
    values = list(TUNABLES[knob].values)
    start = values.pop(len(values) // 2)
    plain = record(engine_of(loaded, **{knob: start}), nothing, [prompt], new_tokens=14)
    assert len(plain) == 3 + 13
    for at in range(1, len(plain)):
        value = values[at % len(values)]
        found = record(
            engine_of(loaded, **{knob: start}),
            lambda engine, step, at=at, value=value: engine.apply(**{knob: value}) if step == at else None,
            [prompt],
            new_tokens=14,
        )
        assert_same_bits(plain, found)


@pytest.mark.parametrize("knob", LOSSLESS)
def test_lossless_switches_change_no_bit_while_idle_prefixes_give_way(loaded: LoadedModel, knob: str) -> None:
    """The pool is full of what finished requests left, so that every new block takes the place of an idle one."""
    values = TUNABLES[knob].values

    def engine_with_prefixes() -> OfflineEngine:
        engine = engine_of(loaded, num_slabs=7)
        rng = random.Random(8)
        for _ in range(6):
            engine.add([rng.randrange(128) for _ in range(270)], SamplingParams(max_tokens=2))
            engine.run()
        return engine

    def switch(engine: OfflineEngine, step: int) -> None:
        engine.apply(**{knob: values[(step + 1) % len(values)]})

    engines = [engine_with_prefixes() for _ in range(2)]
    before = [engine.cache._pools[0].dropped_idle for engine in engines]
    plain, switched = record(engines[0], nothing), record(engines[1], switch)
    assert_same_bits(plain, switched)
    for engine, dropped in zip(engines, before, strict=True):
        assert engine.cache._pools[0].dropped_idle > dropped, "nothing had to give way"
        assert engine.scheduler.counters.preemptions == 0, "batches differ"


def test_prefix_policy_switches_change_no_bit(loaded: LoadedModel) -> None:
    """Every step under another policy, in a pool that is always short of room: only what is cached may differ."""

    def run(switch: bool) -> tuple[list[list[Tensor]], list[str], int]:
        pool_bytes = 5 * sum(slab_bytes(group.shape, 256) for group in loaded.groups)
        values = {"max_num_batched_tokens": 64, "max_num_seqs": 2}
        engine = OfflineEngine(loaded, pool_bytes=pool_bytes, values=values, recent_tokens=32)
        seen: list[str] = []

        def between(engine: OfflineEngine, step: int) -> None:
            if switch:
                engine.apply(prefix_eviction=("lfu", "cost", "lru")[step % 3])
            seen.append(str(engine.values["prefix_eviction"]))
            if step % 40 == 0 and step < 300:  # prompts that come once make cached prefixes go
                rng = random.Random(step)
                engine.add([rng.randrange(128) for _ in range(400)], SamplingParams(max_tokens=4))

        steps = record(engine, between)
        return steps, seen, sum(engine.cache.lives.dropped.values())

    plain, _, dropped = run(switch=False)
    switched, seen, _ = run(switch=True)
    assert dropped > 30
    assert set(seen) == {"lru", "lfu", "cost"}
    assert len(plain) == len(switched)
    for step, (expected, found) in enumerate(zip(plain, switched, strict=True)):
        assert len(expected) == len(found), step
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), step


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_quantised_blocks_change_no_bit_with_their_size(loaded: LoadedModel, kv_format: str) -> None:
    """What was quantised in the first steps is merged and split at every later one; new blocks are native again, since
    larger blocks are quantised later, which does change what is stored.
    """
    seen: set[tuple[str, int]] = set()

    def back(engine: OfflineEngine, step: int) -> None:
        if step == 6:
            engine.apply(kv_format="native")

    def switch(engine: OfflineEngine, step: int) -> None:
        back(engine, step)
        if step >= 6:
            seen.update(classes(engine))
            engine.apply(block_size=BLOCK_SIZES[step * 2 % 5])

    plain = record(engine_of(loaded, kv_format=kv_format, block_size=32), back)
    assert_same_bits(plain, record(engine_of(loaded, kv_format=kv_format, block_size=32), switch))
    assert {size for name, size in seen if name == kv_format} >= {32, 64, 128, 256}


def test_every_request_gets_exactly_its_tokens_whatever_is_switched(loaded: LoadedModel) -> None:
    rng = random.Random(0)
    formats_seen: set[str] = set()
    num_steps = 0

    def switch(engine: OfflineEngine) -> None:
        nonlocal num_steps
        num_steps += 1
        formats_seen.update(row.kv_format for row in engine.cache.resident())
        engine.cache.check_integrity()
        engine.apply(
            kv_format=FORMATS[num_steps // 8 % 4].name,
            block_size=rng.choice(BLOCK_SIZES),
            eviction=rng.choice(["none", "window", "heavy_hitter"]),
            keep_tokens=128,
            max_num_batched_tokens=rng.choice([64, 512]),
            max_num_seqs=rng.choice([1, 4]),
        )

    engine = engine_of(loaded)
    strict = CachePolicy(kv_format_floor="native", allow_eviction=False)
    results = [engine.add(prompt, SamplingParams(max_tokens=NEW_TOKENS)) for prompt in prompts()]
    results.append(engine.add(prompts()[0], SamplingParams(max_tokens=NEW_TOKENS), policy=strict))
    engine.run(lambda _plan: switch(engine))
    assert [len(result.output_ids) for result in results] == [NEW_TOKENS] * 5
    assert formats_seen == {kv_format.name for kv_format in FORMATS}
    usage = engine.cache.usage()
    assert usage.used_bytes == 0


def test_quantisation_loss_is_ordered_and_bounded(loaded: LoadedModel) -> None:
    """Mean KL divergence of next-token distributions to native, teacher-forced; a sanity bound, not a quality claim."""
    rng = random.Random(3)
    text = [rng.randrange(128) for _ in range(300)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=128)
    pool_bytes = 20 * sum(slab_bytes(group.shape, 256) for group in loaded.groups)

    def distributions(kv_format: str) -> Tensor:
        # Small chunks and a short recent window: most of what is attended has been quantised by then.
        values = {"kv_format": kv_format, "max_num_batched_tokens": 64, "block_size": 32}
        (result,) = generate(loaded, [text], params, pool_bytes=pool_bytes, values=values, recent_tokens=16)
        rows = torch.empty(len(result.prompt_logprobs), 128)
        for row, entry in zip(rows, result.prompt_logprobs, strict=True):
            for token, logprob in entry.top:
                row[token] = logprob
        return rows

    native = distributions("native")
    losses = {}
    for kv_format in ("int8", "k8v4", "int4"):
        found = distributions(kv_format)
        losses[kv_format] = float((native.exp() * (native - found)).sum(-1).mean())
    print({name: f"{loss:.2e}" for name, loss in losses.items()})
    assert 0 < losses["int8"] < 2e-3
    assert losses["int8"] < losses["k8v4"] < losses["int4"] < 0.1
