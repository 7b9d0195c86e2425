"""The runner over hand-made block tables and the reference kernels: what it computes, reports and leaves alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.models.random_model import write_random_model
from engine.plan import Entry, RecodeBatch, ScheduledSequence, StepPlan
from engine.request import Request, SamplingParams
from kernels import ops
from kernels.layout import NATIVE, OFFSET_UNIT

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "use_sliding_window": True,
    "sliding_window": 12,
    "max_window_layers": 2,
}
PROMPT = [random.Random(5).randrange(60) for _ in range(50)]
REFERENCE = SimpleNamespace(
    **{
        name: functools.partial(getattr(ops, name), backend="reference")
        for name in ("write_kv", "plan_decode", "decode_attention", "attention_mass", "prefill_attention", "recode")
    }
)


class HandMadeCache:
    """Native blocks of one size, handed out in a shuffled order; entries cover what a step needs."""

    def __init__(self, loaded: LoadedModel, block_size: int, num_blocks: int = 40) -> None:
        self.block_size = block_size
        self.strides = [group.shape.block_bytes(NATIVE, block_size) // OFFSET_UNIT for group in loaded.groups]
        self.arena_bytes = [stride * OFFSET_UNIT * num_blocks for stride in self.strides]
        self.free = random.Random(0).sample(range(num_blocks), num_blocks)
        self.blocks: dict[Request, list[int]] = {}
        self.lengths: dict[Request, int] = {}
        self.version = 0

    def cover(self, request: Request, num_tokens: int) -> None:
        blocks = self.blocks.setdefault(request, [])
        while len(blocks) * self.block_size < num_tokens:
            blocks.append(self.free.pop())
            self.version += 1
        self.lengths[request] = num_tokens

    def entries(self, request: Request, group: int, start: int = 0) -> Sequence[Entry]:
        size, total = self.block_size, self.lengths[request]
        blocks = list(enumerate(self.blocks[request]))[start:]
        return [Entry(b * self.strides[group], 0, i * size, min(size, total - i * size)) for i, b in blocks]

    def entries_versions(self, requests: Sequence[Request], _group: int) -> list[int]:
        return [self.version] * len(requests)

    def first_changed_index(self, _request: Request, _group: int, _since: int) -> int:
        return 0


class Harness:
    """A runner and its cache; ``feed`` runs a step of (request, start, tokens[, samples, observed])."""

    def __init__(self, loaded: LoadedModel, block_size: int = 16, ops: Any = REFERENCE) -> None:
        self.cache = HandMadeCache(loaded, block_size)
        self.runner = ModelRunner(loaded, self.cache.arena_bytes, ops, rng=random.Random(0))

    def feed(self, *parts: Any, samples: bool = True) -> list[Any]:
        for request, start, num_tokens, *_ in parts:
            self.cache.cover(request, start + num_tokens)
        sequences = [ScheduledSequence(*(part if len(part) > 3 else (*part, samples))) for part in parts]
        return self.runner.execute(StepPlan(tuple(sequences)), self.cache)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("runner") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=3, deviation=0.2), dtype="float32")


def make(prompt: Sequence[int] = PROMPT, **params: Any) -> Request:
    return Request("r", list(prompt), SamplingParams(max_tokens=30, **params), arrival_ns=0)


def dense_logits(loaded: LoadedModel, ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab] with plain masked attention: no cache, no blocks."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        steps = torch.arange(len(ids))
        distance = steps[:, None] - steps[None]
        hidden = (distance < 0) | (distance >= (loaded.config.windows[layer] or len(ids)))
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).contiguous()

    with torch.inference_mode():
        hidden = loaded.model.hidden(torch.tensor(ids), torch.arange(len(ids)), len(ids), attend)
        return loaded.model.logits(hidden)


def generate(harness: Harness, request: Request, count: int, chunk: int) -> list[int]:
    done = 0
    while len(request.output_ids) < count:
        total = len(request.prompt_ids) + len(request.output_ids)
        step = min(chunk, total - done)
        (output,) = harness.feed((request, done, step), samples=done + step == total)
        done += step
        if output.token_id is not None:
            request.output_ids.append(output.token_id)
    return request.output_ids


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_greedy_equals_dense_attention(loaded: LoadedModel, block_size: int, chunk: int) -> None:
    request = make()
    output = generate(Harness(loaded, block_size), request, 8, chunk)
    ids = list(PROMPT)
    for token in output:
        assert int(dense_logits(loaded, ids)[-1].argmax()) == token
        ids.append(token)


def test_outputs_keep_the_plans_order_whatever_the_batch(loaded: LoadedModel) -> None:
    harness = Harness(loaded)
    chunked, single, silent = make(), make(PROMPT[:9]), make(PROMPT[5:30])
    harness.feed((single, 0, 8), samples=False)
    outputs = harness.feed((chunked, 0, 50), (single, 8, 1), (silent, 0, 10))
    assert [output.request for output in outputs] == [chunked, single, silent]
    expected = [int(dense_logits(loaded, ids)[-1].argmax()) for ids in (PROMPT, PROMPT[:9], PROMPT[5:15])]
    assert [output.token_id for output in outputs] == expected
    assert harness.feed((silent, 10, 5), samples=False)[0].token_id is None


def test_memory_outside_the_sequence_is_never_attended(loaded: LoadedModel) -> None:
    clean, poisoned = Harness(loaded, 64), Harness(loaded, 64)
    for arena in poisoned.runner.arenas:
        arena.view(torch.float32).fill_(torch.nan)
    assert generate(clean, make(), 4, 20) == generate(poisoned, make(), 4, 20)


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_prompt_logprobs_are_whole(loaded: LoadedModel, chunk: int) -> None:
    request, harness = make(prompt_logprobs=2), Harness(loaded)
    expected = torch.log_softmax(dense_logits(loaded, PROMPT), -1)
    reported = []
    for start in range(0, 50, chunk):
        step = min(chunk, 50 - start)
        (output,) = harness.feed((request, start, step), samples=start + step == 50)
        reported += output.prompt_logprobs
    assert [entry.token_id for entry in reported] == PROMPT[1:]
    own = [float(expected[i, token]) for i, token in enumerate(PROMPT[1:])]
    assert [entry.logprob for entry in reported] == pytest.approx(own, abs=1e-4)
    assert all(len(entry.top) == 2 for entry in reported)
    (again,) = harness.feed((request, 0, 50), samples=False)  # as after a preemption; the scheduler strikes these out
    assert [entry.token_id for entry in again.prompt_logprobs] == PROMPT[1:]


def test_output_logprobs_are_those_of_the_model(loaded: LoadedModel) -> None:
    harness = Harness(loaded)
    asked, plain = make(logprobs=3, temperature=5.0, seed=1, presence_penalty=1.0), make(PROMPT[:20])
    first, second = harness.feed((asked, 0, 50), (plain, 0, 20))
    expected = torch.log_softmax(dense_logits(loaded, PROMPT)[-1], -1)
    assert first.logprobs.token_id == first.token_id
    assert first.logprobs.logprob == pytest.approx(float(expected[first.token_id]), abs=1e-4)
    assert first.logprobs.rank == 1 + int((expected > expected[first.token_id]).sum())
    assert [token for token, _ in first.logprobs.top] == expected.topk(3).indices.tolist()
    assert second.logprobs is None


def test_a_preempted_request_samples_the_same_tokens(loaded: LoadedModel) -> None:
    straight = make(temperature=1.0, seed=9)
    expected = list(generate(Harness(loaded), straight, 6, 50))
    halted, harness = make(temperature=1.0, seed=9), Harness(loaded)
    generate(harness, halted, 3, 50)
    (output,) = harness.feed((halted, 0, 53))  # everything again, in one chunk
    halted.output_ids.append(output.token_id)
    for position in (53, 54):
        (output,) = harness.feed((halted, position, 1))
        halted.output_ids.append(output.token_id)
    assert halted.output_ids == expected


def test_head_runs_only_on_rows_that_are_asked_for(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = loaded.model.logits
    monkeypatch.setattr(loaded.model, "logits", lambda hidden: rows.append(len(hidden)) or original(hidden))
    harness = Harness(loaded)
    harness.feed((make(), 0, 30), samples=False)
    assert rows == []
    harness.feed((make(), 0, 30), (make(), 0, 50))
    assert rows == [2]


@pytest.mark.parametrize("block_size", [16, 64])
def test_attention_of_observed_queries(loaded: LoadedModel, block_size: int) -> None:
    """Decodes and chunks in one step, some observed: per group the most that any head of any layer pays a chunk."""
    harness = Harness(loaded, block_size)
    one, two = make(), make([*PROMPT[7:40]])
    silent, alone = make(PROMPT[3:30]), make(PROMPT[9:26])
    harness.feed((one, 0, 40), (two, 0, 32), (alone, 0, 16), samples=False)
    outputs = harness.feed(
        (one, 40, 10, True, 6), (two, 32, 1, True, 1), (silent, 0, 27, True, 0), (alone, 16, 1, True, 0)
    )
    assert [output.mass is None for output in outputs] == [False, False, True, True]
    for output, ids, count in ((outputs[0], PROMPT, 6), (outputs[1], two.prompt_ids, 1)):
        assert output.mass.queries == count
        for found, expected in zip(output.mass.groups, dense_mass(loaded, ids, count), strict=True):
            assert found.dtype == np.float32
            assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def dense_mass(loaded: LoadedModel, ids: Sequence[int], count: int) -> list[Tensor]:
    """Per group [chunks], of the last ``count`` queries."""
    weights: dict[int, Tensor] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        steps = torch.arange(len(ids))
        distance = steps[:, None] - steps[None]
        hidden = (distance < 0) | (distance >= (loaded.config.windows[layer] or len(ids)))
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * query.shape[-1] ** -0.5
        weights[layer] = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights[layer], value.repeat_interleave(2, 1)).contiguous()

    with torch.inference_mode():
        loaded.model.hidden(torch.tensor(ids), torch.arange(len(ids)), len(ids), attend)
    found = []
    for group in loaded.groups:
        stacked = torch.stack([weights[layer] for layer in group.layers])[:, :, -count:].mean(2)  # layers, heads, keys
        padded = torch.nn.functional.pad(stacked, (0, -len(ids) % 16))
        found.append(padded.unflatten(1, (2, 2)).mean(2).unflatten(-1, (-1, 16)).sum(-1).amax((0, 1)))
    return found


def test_work_is_counted_in_bytes_and_an_empty_plan_is_none(loaded: LoadedModel) -> None:
    harness, request = Harness(loaded), make()
    per_token = [group.shape.tile_stride(NATIVE) // 16 for group in loaded.groups]
    harness.feed((request, 0, 40))
    assert harness.runner.last_work.kv_bytes_written == 40 * sum(per_token)
    harness.feed((request, 40, 1))
    assert harness.runner.last_work.kv_bytes_read == 41 * per_token[0] + 12 * per_token[1]
    assert harness.runner.execute(StepPlan(), harness.cache) == []
    assert harness.runner.last_work.kv_bytes_read == 0


def test_recodes_reach_the_kernel_of_their_group(loaded: LoadedModel) -> None:
    calls: list[tuple[int, Any, list[list[int]], torch.dtype]] = []

    def spy(arena: Tensor, shape: Any, jobs: Tensor, *, native_dtype: torch.dtype) -> None:
        calls.append((arena.data_ptr(), shape, jobs.tolist(), native_dtype))

    harness = Harness(loaded, ops=SimpleNamespace(recode=spy))
    job = (1, 8, 0, 0, 0, 0, 0, 1)
    harness.runner.recode([RecodeBatch(1, (job,), 32), RecodeBatch(0, (), 0)])
    runner = harness.runner
    assert calls == [(runner.arenas[1].data_ptr(), loaded.groups[1].shape, [list(job)], torch.float32)]


def test_a_step_plans_each_group_once_for_all_its_layers(loaded: LoadedModel) -> None:
    made, used = [], []

    def plan(*arguments: Any, **options: Any) -> Any:
        made.append(REFERENCE.plan_decode(*arguments, **options))
        return made[-1]

    def attend(*arguments: Any, plan: Any, **options: Any) -> None:
        used.append(plan)
        REFERENCE.decode_attention(*arguments, plan=plan, **options)

    kernels = SimpleNamespace(**{**vars(REFERENCE), "plan_decode": plan, "decode_attention": attend})
    harness, first, second = Harness(loaded, ops=kernels), make(), make()
    harness.feed((first, 0, 20), (second, 0, 4))
    assert made == used == []
    harness.feed((first, 20, 1, True, 1), (second, 4, 5))
    assert len(loaded.groups) == 2
    assert {plan.window for plan in made} == {0, 12}
    assert all(plan.mass for plan in made)
    assert [used.count(plan) for plan in made] == [len(group.layers) for group in loaded.groups]
    harness.feed((first, 21, 1), (second, 9, 1))
    assert len(made) == 4
    assert not made[-1].mass
