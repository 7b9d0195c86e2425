"""Attention over blocks of every format and several sizes is dense attention over the stored values, and so are logits.

The engine runs a request whose storage is switched all the time. At every step each kernel call is checked against
plain attention, in float64, over what the tables say is stored; and the logits of every decoded token against a model
that attends to gathered keys and values, without tables or kernels.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loader import LoadedModel, load_model
from engine.memory_model import slab_bytes
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine
from engine.plan import SequenceOutput, StepPlan
from engine.request import Request, SamplingParams
from kernels import ops, reference
from kernels.layout import BLOCK_SIZES, ENTRY_FIRST, ENTRY_VALID, FORMATS, KVShape
from kernels.table import TableView

TOLERANCE = 1e-5
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 200, "max_window_layers": 1}
# A milder format applies to new blocks only, so this order leaves all four in one sequence.
SCHEDULE = (("int4", 200), ("k8v4", 360), ("int8", 500), ("native", 1 << 30))


@pytest.fixture(scope="module", params=[{}, WINDOWED], ids=["full", "windowed"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("mixed") / "model"
    return load_model(write_random_model(folder, {**CONFIG, **request.param}, seed=7, deviation=0.15), dtype="float32")


def dense(query: Tensor, key: Tensor, value: Tensor, at: Tensor, positions: Tensor, window: int) -> Tensor:
    """Masked attention in float64: queries [n, heads, dim] at positions ``at`` over [m, kv_heads, dim] at theirs."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (kv.to(torch.float64).repeat_interleave(repeats, 1) for kv in (key, value))
    distance = at[:, None] - positions[None]
    hidden = (distance < 0) | (distance >= (window or 1 << 30))
    scores = torch.einsum("qhd,khd->hqk", query.to(torch.float64), key) * query.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


@dataclass
class CheckedOps:
    """The kernels, each of whose results is compared with dense attention over what its tables list."""

    worst: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    plan_decode = staticmethod(ops.plan_decode)
    write_kv = staticmethod(ops.write_kv)
    recode = staticmethod(ops.recode)

    def decode_attention(
        self, query: Tensor, arena: Tensor, shape: KVShape, layer: int, table: TableView, **options: Any
    ) -> None:
        ops.decode_attention(query, arena, shape, layer, table, **options)
        starts = torch.arange(len(query) + 1)
        self._check("decode", query, arena, shape, layer, table, starts, options)

    def prefill_attention(
        self,
        query: Tensor,
        arena: Tensor,
        shape: KVShape,
        layer: int,
        table: TableView,
        query_starts: Tensor,
        **options: Any,
    ) -> None:
        ops.prefill_attention(query, arena, shape, layer, table, query_starts, **options)
        self._check("prefill", query, arena, shape, layer, table, query_starts, options)

    def _check(
        self,
        name: str,
        query: Tensor,
        arena: Tensor,
        shape: KVShape,
        layer: int,
        table: TableView,
        starts: Tensor,
        options: dict[str, Any],
    ) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        for row in range(len(starts) - 1):
            entries, count = table.entries[row], int(table.num_entries[row])
            key, value = reference.gather_kv(arena, shape, layer, entries, count)
            part = slice(int(starts[row]), int(starts[row + 1]))
            at = int(table.query_first[row]) + torch.arange(part.stop - part.start)
            want = dense(query[part], key, value, at, positions_of(entries[:count]), options["window"])
            self.worst = max(self.worst, float((options["out"][part] - want).abs().max()))


def positions_of(entries: Tensor) -> Tensor:
    return torch.cat([torch.arange(int(e[ENTRY_FIRST]), int(e[ENTRY_FIRST] + e[ENTRY_VALID])) for e in entries])


def dense_logits(engine: OfflineEngine, request: Request, start: int) -> Tensor:
    """Logits after the token at ``start``, by a model that attends to what is stored of those before it."""
    stored: dict[int, tuple[Tensor, Tensor, Tensor, int]] = {}
    for number, group in enumerate(engine.loaded.groups):
        listed = engine.cache.entries(request, number)
        rows = torch.tensor([[e.offset, e.format_code, e.first, e.valid] for e in listed], dtype=torch.int32)
        positions = positions_of(rows)
        known = positions < start  # the table has a place for the new token too, not yet written
        for index, layer in enumerate(group.layers):
            key, value = reference.gather_kv(engine.runner.arenas[number], group.shape, index, rows, len(rows))
            stored[layer] = (key[known], value[known], positions[known], group.window or 0)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        old_key, old_value, positions, window = stored[layer]
        at = torch.tensor([start])
        keys, values = torch.cat([old_key, key]), torch.cat([old_value, value])
        return dense(query, keys, values, at, torch.cat([positions, at]), window).float()

    ids = torch.tensor([request.all_ids[start]])
    model = engine.loaded.model
    return model.logits(model.hidden(ids, torch.tensor([start]), start + 1, attend))[0]


def classes_of(engine: OfflineEngine, request: Request) -> set[tuple[str, int]]:
    """Formats and sizes of a request's blocks in the group of full attention."""
    number = next(i for i, group in enumerate(engine.loaded.groups) if group.window is None)
    table = engine.cache._by_request[request.request_id].tables[number]
    return {tuple(block.block_class) for block in table.blocks}


def test_every_format_and_several_sizes_in_one_sequence_attend_as_if_dense(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = CheckedOps()
    engine = OfflineEngine(
        loaded,
        pool_bytes=40 * sum(slab_bytes(group.shape, 256) for group in loaded.groups),
        values={"max_num_batched_tokens": 64, "kv_format": "int4"},
        recent_tokens=32,
        ops=kernels,
    )
    captured: list[Tensor] = []
    original_logits, original_execute = loaded.model.logits, engine.runner.execute
    worst_logits, mixed_steps = 0.0, 0

    def spy(hidden: Tensor) -> Tensor:
        captured.append(original_logits(hidden))
        return captured[-1]

    def execute(plan: StepPlan, cache: Any) -> list[SequenceOutput]:
        nonlocal worst_logits, mixed_steps
        sequence = plan.sequences[0]
        if not sequence.is_decode:
            return original_execute(plan, cache)
        classes = classes_of(engine, sequence.request)
        want = dense_logits(engine, sequence.request, sequence.start)
        with monkeypatch.context() as patched:
            patched.setattr(loaded.model, "logits", spy)
            outputs = original_execute(plan, cache)
        worst_logits = max(worst_logits, float((captured[-1][0] - want).abs().max()))
        formats, sizes = {name for name, _ in classes}, {size for _, size in classes}
        mixed_steps += formats == {kind.name for kind in FORMATS} and len(sizes) >= 3
        return outputs

    monkeypatch.setattr(engine.runner, "execute", execute)
    rng = random.Random(4)
    result = engine.add([rng.randrange(128) for _ in range(620)], SamplingParams(max_tokens=40, ignore_eos=True))

    def switch(_plan: StepPlan) -> None:
        done = result.request.num_computed_tokens
        kv_format = next(name for name, until in SCHEDULE if done < until)
        engine.apply(kv_format=kv_format, block_size=rng.choice(BLOCK_SIZES))

    engine.run(switch)
    print(f"attention {kernels.worst:.1e}, logits {worst_logits:.1e}, {mixed_steps} steps with all formats")
    assert mixed_steps >= 10, "the sequence never had every format and three block sizes at once"
    assert kernels.calls["decode"] == 39 * 3
    assert kernels.calls["prefill"] >= 10 * 3 - 3
    assert kernels.worst < TOLERANCE
    assert worst_logits < TOLERANCE
