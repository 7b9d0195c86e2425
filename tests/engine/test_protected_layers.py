"""The first layers as a group of their own that stays native, from the loader to the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cache_world import SHAPE, World, ids

from engine.arena import IntegrityError
from engine.cache_audit import check_group
from engine.errors import EngineError
from engine.formats import FORMATS, NATIVE, OFFSET_UNIT
from engine.loader import LoadedModel, load_model
from engine.memory_model import GroupSpec, pool_capacity, sequence_bytes
from engine.models.groups import layer_groups
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine
from engine.readings import progress, read_gauges
from engine.request import SamplingParams
from kernels import ops
from kernels.layout import INT4

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "use_sliding_window": True,
    "sliding_window": 300,
    "max_window_layers": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("protected") / "model", CONFIG, seed=6, deviation=0.25)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32", protect_layers=2)


def test_groups_by_window_and_protection(loaded: LoadedModel) -> None:
    found = [(group.name, group.layers, group.window, group.lossiest) for group in loaded.groups]
    assert found == [
        ("protected-full", (0, 1), None, "native"),
        ("full", (2,), None, None),
        ("window300", (3, 4), 300, None),
    ]
    assert [group.lossiest for group in layer_groups(loaded.config, 4, 5)] == ["native", "native"]
    assert [group.lossiest for group in layer_groups(loaded.config, 4)] == [None, None]


@pytest.mark.parametrize("count", [-1, 6])
def test_no_more_layers_than_there_are(folder: Path, count: int) -> None:
    with pytest.raises(EngineError, match=f"--protect-layers {count}: this model has 5 layers"):
        load_model(folder, protect_layers=count)


def test_protected_kv_never_loses_a_bit_and_the_rest_is_converted(loaded: LoadedModel) -> None:
    prompt = [(7 * i * i + i) % 64 for i in range(400)]
    stored: dict[str, dict[int, torch.Tensor]] = {}
    for kv_format in ("native", "int4"):
        engine = OfflineEngine(loaded, pool_bytes=16 << 20, values={"kv_format": kv_format, "block_size": 64})
        result = engine.add(prompt, SamplingParams(max_tokens=40))
        for _ in range(8):
            engine.step()
            engine.cache.check_integrity()
        stored[kv_format] = {group: keys(engine, result.request, group) for group in range(3)}
        codes = [{entry.format_code for entry in engine.cache.entries(result.request, group)} for group in range(3)]
        lossy = {NATIVE.code, FORMATS[-1].code} if kv_format == "int4" else {NATIVE.code}
        assert codes == [{NATIVE.code}, lossy, lossy]
        assert engine.cache.converged_fraction() == 1.0
        assert engine.cache.usage().held_below_format_bytes == 0
    # Its keys of the prompt's first chunk were computed before anything was quantised.
    assert torch.equal(stored["native"][0][:300], stored["int4"][0][:300])
    assert not torch.equal(stored["native"][1][:300], stored["int4"][1][:300])


def keys(engine: OfflineEngine, request: Any, group: int) -> torch.Tensor:
    rows = [
        (entry.offset, entry.format_code, entry.first, entry.valid) for entry in engine.cache.entries(request, group)
    ]
    table = torch.tensor(rows, dtype=torch.int32)
    arena, shape = engine.runner.arenas[group], engine.loaded.groups[group].shape
    return ops.gather_kv(arena, shape, 0, table, len(rows), native_dtype=torch.float32)[0]


def test_bytes_are_exact(loaded: LoadedModel) -> None:
    """Pool, memory model and gauges say the same, and what the layout lays out."""
    engine = OfflineEngine(loaded, pool_bytes=16 << 20, values={"kv_format": "int4", "block_size": 64}, recent_tokens=0)
    engine.add([(3 * i) % 64 for i in range(192)], SamplingParams(max_tokens=9))
    for _ in range(5):
        engine.step()
    expected = 0
    for group in loaded.groups:
        # 192 tokens as asked for, and one native block that grows: of 64, or of 16 where it will be quantised.
        kind, tail_tiles = (NATIVE, 4) if group.lossiest else (INT4, 1)
        full = group.shape.tile_stride(kind) * 192 // kind.tile_tokens
        expected += -(-full // (3 * OFFSET_UNIT)) * 3 * OFFSET_UNIT + group.shape.tile_stride(NATIVE) * tail_tiles
    usage = engine.cache.usage()
    assert usage.used_bytes == expected
    growing = sum(sequence_bytes([group], 1, "native", 64 if group.lossiest else 16) for group in loaded.groups)
    assert sequence_bytes(loaded.groups, 192, "int4", 64) + growing == expected
    gauges = read_gauges(engine.scheduler)
    assert sum(row.bytes for row in gauges.resident) == expected
    # A token counts once, in the format that the unprotected layers have it in.
    assert {(row.kv_format, row.tokens) for row in gauges.resident} == {("int4", 192), ("native", 0)}
    per_token = {
        kind.name: sum(
            group.shape.tile_stride(kind if group.lossiest is None else NATIVE)
            / (kind if group.lossiest is None else NATIVE).tile_tokens
            for group in loaded.groups
        )
        for kind in FORMATS
    }
    assert gauges.kv_bytes_per_token == per_token
    assert progress("kv_format", "int4", engine.scheduler).status == "applied"


def test_capacity_is_that_of_the_group_that_holds_least() -> None:
    plain = [GroupSpec("a", (0,), SHAPE), GroupSpec("b", (1,), SHAPE)]
    mixed = [GroupSpec("a", (0,), SHAPE, lossiest="native"), GroupSpec("b", (1,), SHAPE)]
    pool_bytes = 64 * 2 * SHAPE.block_bytes(NATIVE, 256)
    native = pool_capacity(plain, pool_bytes, "native", 32)
    assert pool_capacity(mixed, pool_bytes, "int4", 32) == native < pool_capacity(plain, pool_bytes, "int4", 32)
    assert [group.format_under("int4") for group in mixed] == ["native", "int4"]
    with pytest.raises(ValueError, match="kv_format 'int5'"):
        GroupSpec("a", (0,), SHAPE, lossiest="int5")


def test_a_limit_other_than_native_is_kept_too_and_audited() -> None:
    world = World(num_slabs=16, windows=(None, None), lossiest=("int8", None), values={"kv_format": "int4"})
    request = world.add(ids(1, 300), max_tokens=30)
    for _ in range(20):
        world.step()
        world.check()
    formats = [{name for name, *_ in world.table(request, group)} for group in range(2)]
    assert formats == [{"int8", "native"}, {"int4", "native"}]
    follow = world.add([*ids(1, 300), 5], max_tokens=2)
    world.run(check=True)
    assert follow.num_cached_tokens == 288  # what is lossier than the protected group's limit is no obstacle
    pool = world.cache._pools[1]
    spec = GroupSpec("g1", (0,), SHAPE, lossiest="int8")
    with pytest.raises(IntegrityError, match="of g1 is"):
        check_group(1, spec, pool, [], world.cache._prefix, [], set())
