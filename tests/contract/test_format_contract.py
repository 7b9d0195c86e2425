"""What holds for every storage format of ``kernels.layout.FORMATS``, on every backend that runs here.

Tokens are written native, recoded, read back and attended to through ``kernels.ops``. Whatever must not be read is NaN
(0xff bytes). Under TRITON_INTERPRET=1 the Triton kernels are among the backends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from engine.formats import class_for, lossiness_of
from engine.memory_model import GroupSpec, blocks_per_slab, pool_capacity, sequence_bytes, token_bytes
from engine.tunables import TUNABLES
from kernels import ops, reference
from kernels.formats.base import CODE_BITS
from kernels.layout import BLOCK_SIZES, FORMAT_BY_NAME, FORMATS, NATIVE, OFFSET_UNIT, KVFormat, KVShape
from kernels.reference.tolerances import attention_tolerance, mass_tolerance, storage_tolerance
from kernels.table import TableView

BACKENDS = ("reference", "cpu", *(("triton",) if os.environ.get("TRITON_INTERPRET") == "1" else ()))
HEAD_DIMS = (48, 64, 80, 96, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = 32  # one quantised tile, two native ones
PAIRS = [(source, target) for target in FORMATS for source in FORMATS[: target.code]]


def ids(value: object) -> str | None:
    return value.name if isinstance(value, KVFormat) else str(value) if isinstance(value, torch.dtype) else None


every_format = pytest.mark.parametrize("kv_format", FORMATS, ids=ids)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=ids)


class Store:
    """An arena with room for ``blocks`` blocks of 32 native tokens, all NaN; places are handed out in turn."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, backend: str, blocks: int = 3) -> None:
        self.shape, self.dtype, self.backend = shape, dtype, backend
        self.units = shape.block_bytes(NATIVE, TOKENS) // OFFSET_UNIT
        self.arena = torch.full(((blocks * self.units + 2) * OFFSET_UNIT,), 255, dtype=torch.uint8)
        self.used = 0

    def place(self) -> int:
        self.used += 1
        return 1 + (self.used - 1) * self.units

    def write(self, kv: torch.Tensor) -> int:
        """Write [layers, 2, 32, kv_heads, head_dim] native (no format's concern: by the reference); the offset."""
        offset = self.place()
        slots = torch.tensor([(offset, index) for index in range(TOKENS)], dtype=torch.int32)
        for layer in range(self.shape.num_layers):
            ops.write_kv(self.arena, self.shape, layer, kv[layer, 0], kv[layer, 1], slots, backend="reference")
        return offset

    def recode(self, offsets: Sequence[int], source: KVFormat, target: KVFormat) -> list[int]:
        """Convert one tile of each block to ``target`` in a fresh place; returns these."""
        fresh = [self.place() for _ in offsets]
        jobs = [
            (target.code, place, 0, source.code, offset, 0, *((offset, 1) if source.is_native else (-1, -1)))
            for offset, place in zip(offsets, fresh, strict=True)
        ]
        table = torch.tensor(jobs, dtype=torch.int32)
        ops.recode(self.arena, self.shape, table, native_dtype=self.dtype, backend=self.backend)
        return fresh

    def read(self, offsets: Sequence[int], kv_format: KVFormat) -> torch.Tensor:
        """What is stored, float32 [layers, 2, 32 * blocks, kv_heads, head_dim]."""
        entries = torch.tensor(
            [(offset, kv_format.code, TOKENS * place, TOKENS) for place, offset in enumerate(offsets)],
            dtype=torch.int32,
        )
        arguments = (entries, len(offsets))
        gathered = [
            ops.gather_kv(self.arena, self.shape, i, *arguments, native_dtype=self.dtype, backend=self.backend)
            for i in range(self.shape.num_layers)
        ]
        return torch.stack([torch.stack(pair) for pair in gathered])

    def stored(self, kv: torch.Tensor, kv_format: KVFormat) -> list[int]:
        """Store [layers, 2, 32 * blocks, kv_heads, head_dim]; the blocks' offsets."""
        offsets = [self.write(block) for block in kv.split(TOKENS, dim=2)]
        return offsets if kv_format.is_native else self.recode(offsets, NATIVE, kv_format)


def half_steps(kv: torch.Tensor, kv_format: KVFormat, dtype: torch.dtype) -> torch.Tensor:
    """Largest allowed distance of what is stored from float32 ``kv`` [layers, 2, 32, kv_heads, head_dim]."""
    allowed = torch.zeros_like(kv)
    for which, (bits, dim) in enumerate(((kv_format.bits_k, 1), (kv_format.bits_v, 3))):
        if bits:
            values = kv[:, which].double()
            step = (values.amax(dim, keepdim=True) - values.amin(dim, keepdim=True)) / (2**bits - 1)
            allowed[:, which] = storage_tolerance(dtype, step, values.abs().amax(dim, keepdim=True)).float()
    return allowed


def random_kv(shape: KVShape, tokens: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn((shape.num_layers, 2, tokens, shape.num_kv_heads, shape.head_dim), generator=generator)
    kv[:, 0] += torch.randn((shape.num_layers, 1, shape.num_kv_heads, shape.head_dim), generator=generator)
    return kv.to(dtype)


@every_format
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", [8, *HEAD_DIMS])
def test_parts_follow_each_other_without_gaps(kv_format: KVFormat, element_bytes: int, head_dim: int) -> None:
    shape = KVShape(3, 2, head_dim, element_bytes)
    layout, tokens = shape.head_layout(kv_format), kv_format.tile_tokens
    if kv_format.is_native:
        sizes = [tokens * head_dim * element_bytes] * 2
        starts = [layout.k, layout.v]
    else:
        codes = [tokens * head_dim * bits // 8 for bits in (kv_format.bits_k, kv_format.bits_v)]
        constants = [head_dim * element_bytes] * 2, [tokens * element_bytes] * 2
        sizes = [codes[0], *constants[0], codes[1], *constants[1]]
        starts = [layout.k, layout.k_scale, layout.k_zero, layout.v, layout.v_scale, layout.v_zero]
    assert starts == [sum(sizes[:i]) for i in range(len(sizes))]
    assert layout.size == sum(sizes) == shape.head_bytes(kv_format)
    # Elements are read as such, and whole parts are copied 16 bytes at a time.
    assert all(start % 16 == 0 for start in (*starts, layout.size))
    assert shape.tile_bytes(kv_format) == 2 * layout.size
    assert shape.tile_stride(kv_format) == 6 * layout.size


@every_format
def test_blocks_are_whole_tiles_at_multiples_of_256(kv_format: KVFormat) -> None:
    shape = KVShape(5, 3, 80, 2)
    for size in BLOCK_SIZES:
        if size % kv_format.tile_tokens:
            with pytest.raises(ValueError, match=f"no {kv_format.name} block of {size}"):
                shape.block_bytes(kv_format, size)
            continue
        exact = size // kv_format.tile_tokens * shape.tile_stride(kv_format)
        assert shape.block_bytes(kv_format, size) % OFFSET_UNIT == 0
        assert 0 <= shape.block_bytes(kv_format, size) - exact < OFFSET_UNIT


@every_format
def test_memory_model_counts_every_byte(kv_format: KVFormat) -> None:
    for shape in (KVShape(6, 2, 64, 2), KVShape(3, 1, 96, 4), KVShape(1, 5, 8, 2)):
        heads = shape.num_layers * shape.num_kv_heads
        per_token = 2 * shape.head_dim * shape.element_bytes
        if not kv_format.is_native:
            codes = shape.head_dim * (kv_format.bits_k + kv_format.bits_v) / 8
            per_token = codes + 2 * shape.element_bytes * (shape.head_dim / 32 + 1)
        assert token_bytes(shape, kv_format) == heads * per_token
        group = GroupSpec("all", tuple(range(shape.num_layers)), shape)
        size = kv_format.tile_tokens
        assert sequence_bytes([group], 65, kv_format.name, size) == -(-65 // size) * shape.block_bytes(kv_format, size)
        assert blocks_per_slab(shape, class_for(kv_format.name, 256), 256) >= 1
        assert pool_capacity([group], 8 << 20, kv_format.name, size) >= pool_capacity([group], 8 << 20, "native", 16)


@every_format
def test_everybody_knows_it(kv_format: KVFormat) -> None:
    assert FORMATS[kv_format.code] is FORMAT_BY_NAME[kv_format.name] is kv_format
    assert kv_format.code == kv_format.lossiness == lossiness_of(kv_format.name)
    assert kv_format.is_native == (kv_format is NATIVE) == (kv_format.expected_loss == 0)
    assert kv_format.is_native or {kv_format.bits_k, kv_format.bits_v} <= set(CODE_BITS)
    assert TUNABLES["kv_format"].values[kv_format.code] == kv_format.name
    assert class_for(kv_format.name, 16).block_size == kv_format.tile_tokens


@every_format
@every_backend
@every_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_narrow_band_away_from_zero(kv_format: KVFormat, backend: str, dtype: torch.dtype, head_dim: int) -> None:
    """A range that excludes zero is not widened to include it, whatever the head size (InternLM/lmdeploy#4849)."""
    shape = KVShape(1, 2, head_dim, dtype.itemsize)
    kv = 5 + torch.rand((1, 2, TOKENS, 2, head_dim), generator=torch.Generator().manual_seed(head_dim))
    kv[:, :, 0], kv[:, :, 1] = 5.0, 6.0  # every key channel spans the band; so does every token, by what follows
    kv[..., 0], kv[..., 1] = 5.0, 6.0
    kv[:, 0, 0, :, 1], kv[:, 0, 1, :, 0] = 5.0, 6.0
    kv = kv.to(dtype)
    store = Store(shape, dtype, backend)
    got = store.read(store.stored(kv, kv_format), kv_format)
    error = (got - kv.float()).abs()
    for which, bits in enumerate((kv_format.bits_k, kv_format.bits_v)):
        bound = 1 / (2**bits - 1) / 2 * (1 + 2 * torch.finfo(dtype).eps) + 1e-5 if bits else 0.0
        assert float(error[:, which].max()) <= bound


@every_format
@every_backend
def test_every_head_size_keeps_a_narrow_band(kv_format: KVFormat, backend: str) -> None:
    """InternLM/lmdeploy#4849 for all that a model may have, powers of two or not."""
    for head_dim in range(8, 264, 8):
        test_narrow_band_away_from_zero(kv_format, backend, torch.bfloat16, head_dim)


@every_format
@every_backend
@every_dtype
@pytest.mark.parametrize("constant", [0.0, 3.5, 100.0, -100.0, 1e-8, 60000.0])
def test_constants_come_back_and_near_constants_within_half_a_step(
    kv_format: KVFormat, backend: str, dtype: torch.dtype, constant: float
) -> None:
    """No range, an almost empty one, and one that a single large value makes (openvinotoolkit/openvino#34105)."""
    shape = KVShape(1, 1, 48, dtype.itemsize)
    store = Store(shape, dtype, backend, blocks=8)
    kv = torch.full((1, 2, 4 * TOKENS, 1, 48), constant).to(dtype)
    # One unit in the last place of the dtype: the next integer of the same bits, towards larger magnitudes.
    kv[:, :, TOKENS + 3, :, 5].view(torch.int32 if dtype == torch.float32 else torch.int16).add_(1)
    kv[:, :, 2 * TOKENS + 3, :, 5] = 60000.0
    kv[:, :, 3 * TOKENS + 3, :, 5] = -60000.0
    got = store.read(store.stored(kv, kv_format), kv_format).split(TOKENS, dim=2)
    assert torch.equal(got[0], kv[:, :, :TOKENS].float())
    for mine, exact in zip(got, kv.float().split(TOKENS, dim=2), strict=True):
        assert torch.isfinite(mine).all()
        assert ((mine - exact).abs() <= half_steps(exact, kv_format, dtype)).all()


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=ids)
@every_backend
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 80), (torch.bfloat16, 128), (torch.float16, 96)], ids=ids
)
def test_recodes_from_every_milder_format(
    source: KVFormat, target: KVFormat, backend: str, dtype: torch.dtype, head_dim: int
) -> None:
    """Within half a step of what the milder format held; parts whose bits do not change, exactly; nothing around."""
    shape = KVShape(2, 2, head_dim, dtype.itemsize)
    kv = random_kv(shape, TOKENS, dtype, seed=target.code)
    store = Store(shape, dtype, backend)
    offsets = store.stored(kv, source)
    held = store.read(offsets, source)
    before = store.arena.clone()
    fresh = store.recode(offsets, source, target)
    got = store.read(fresh, target)
    allowed = half_steps(held, target, dtype)
    for which, unchanged in enumerate((source.bits_k == target.bits_k, source.bits_v == target.bits_v)):
        if unchanged:
            allowed[:, which] = 0
    assert ((got - held).abs() <= allowed).all()
    changed = (store.arena != before).nonzero()[:, 0]
    start = fresh[0] * OFFSET_UNIT
    assert int(changed[0]) >= start
    assert int(changed[-1]) < start + shape.tile_stride(target)
    again = Store(shape, dtype, "reference")
    again.recode(again.stored(kv, source), source, target)
    assert torch.equal(store.arena, again.arena), "not the reference's bytes"


def mixture(
    kv_format: KVFormat, shape: KVShape, dtype: torch.dtype, tail: int, sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence of this format and native in turn, 32 tokens each, 16 native and ``tail`` more; arena and entries.

    ``sizes``: how many runs of 32 tokens each quantised block holds.
    """
    generator = torch.Generator().manual_seed(kv_format.code)
    runs = sum(sizes)
    kv = random_kv(shape, 64 * runs + 32, dtype, seed=kv_format.code)
    native, ours = (shape.block_bytes(each, TOKENS) // OFFSET_UNIT for each in (NATIVE, kv_format))
    scratch = Store(shape, dtype, "reference")
    order = torch.randperm(2 * runs + 1, generator=generator).tolist()
    room = native + ours * max(sizes)
    arena = torch.full(((1 + len(order) * room) * OFFSET_UNIT,), 255, dtype=torch.uint8)
    entries: list[tuple[int, int, int, int]] = []
    position = 0

    def put(form: KVFormat, parts: int, valid: int) -> None:
        nonlocal position
        offset = 1 + order[len(entries)] * room
        size = shape.tile_stride(form) * (TOKENS // form.tile_tokens)
        for part in range(parts):
            scratch.used = 0
            begin = position + part * TOKENS
            block = kv[:, :, begin : begin + TOKENS].clone()
            if form.is_native:
                block[:, :, valid:] = torch.nan
            at = scratch.stored(block, form)[0] * OFFSET_UNIT
            to = offset * OFFSET_UNIT + part * size
            arena[to : to + size] = scratch.arena[at : at + size]
        entries.append((offset, form.code, position, valid))
        position += valid

    for parts in sizes:
        put(kv_format, parts, parts * TOKENS)
        put(NATIVE, 1, TOKENS)
    put(NATIVE, 1, 16 + tail)
    return arena, torch.tensor([entries], dtype=torch.int32)


@every_format
@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=ids)
@pytest.mark.parametrize("window", [0, 70])
def test_attention_over_it_is_exact_for_what_is_stored(
    kv_format: KVFormat, backend: str, dtype: torch.dtype, window: int
) -> None:
    """Decode, prefill and the shares of attention against float64, in a sequence that also holds native blocks."""
    shape = KVShape(2, 2, 80, dtype.itemsize)
    arena, entries = mixture(kv_format, shape, dtype, tail=5, sizes=(2, 1))
    length = 160 + 21
    generator = torch.Generator().manual_seed(3)
    query = torch.randn((7, 4, 80), generator=generator).to(dtype)
    starts = torch.tensor([0, 7], dtype=torch.int32)
    count = torch.tensor([entries.shape[1]], dtype=torch.int32)
    decode, prefill = (
        TableView(entries, count, torch.tensor([first], dtype=torch.int32)) for first in (length - 1, length - 7)
    )
    chunks = length // 16 + 1
    got = [torch.full((1, 4, 80), torch.nan, dtype=dtype), torch.full((7, 4, 80), torch.nan, dtype=dtype)]
    masses = [torch.full((1, 2, chunks), torch.nan) for _ in range(2)]
    want = [torch.empty(part.shape, dtype=torch.float64) for part in (*got, *masses)]
    keywords = {"scale": 80**-0.5, "window": window}
    arguments = (arena, shape, 1)
    ops.decode_attention(query[6:], *arguments, decode, **keywords, out=got[0], mass=masses[0], backend=backend)
    ops.prefill_attention(query, *arguments, prefill, starts, **keywords, out=got[1], backend=backend)
    ops.attention_mass(query, *arguments, prefill, starts, **keywords, last=4, mass=masses[1], backend=backend)
    exact = torch.float64
    reference.decode_attention(query[6:], *arguments, decode, **keywords, out=want[0], mass=want[2], dtype=exact)
    reference.prefill_attention(query, *arguments, prefill, starts, **keywords, out=want[1], dtype=exact)
    reference.attention_mass(query, *arguments, prefill, starts, **keywords, last=4, mass=want[3], dtype=exact)
    limits = [attention_tolerance(dtype)] * 2 + [mass_tolerance(dtype)] * 2
    for mine, exactly, limit in zip((*got, *masses), want, limits, strict=True):
        torch.testing.assert_close(mine.double(), exactly, rtol=limit.rtol, atol=limit.atol)


@every_format
@every_backend
def test_block_size_changes_no_bit(kv_format: KVFormat, backend: str) -> None:
    """Three tiles in one block or in three: decode's result and its shares of attention."""
    shape, dtype = KVShape(1, 2, 64, 2), torch.bfloat16
    query = torch.randn((1, 4, 64), generator=torch.Generator().manual_seed(4)).to(dtype)
    store = Store(shape, dtype, backend, blocks=16)
    kv = random_kv(shape, 3 * TOKENS, dtype, seed=1)
    size = shape.tile_stride(kv_format) * (TOKENS // kv_format.tile_tokens)
    blocks = store.stored(kv, kv_format)
    large = store.place()
    store.used += 2
    for part, offset in enumerate(blocks):
        source, target = offset * OFFSET_UNIT, large * OFFSET_UNIT + part * size
        store.arena[target : target + size] = store.arena[source : source + size]
    results = []
    for entries in (
        [(offset, kv_format.code, 32 * part, 32) for part, offset in enumerate(blocks)],
        [(large, kv_format.code, 0, 96)],
    ):
        table = TableView(
            torch.tensor([entries], dtype=torch.int32),
            torch.tensor([len(entries)], dtype=torch.int32),
            torch.tensor([95], dtype=torch.int32),
        )
        out, mass = torch.full((1, 4, 64), torch.nan, dtype=dtype), torch.full((1, 2, 6), torch.nan)
        ops.decode_attention(query, store.arena, shape, 0, table, scale=0.125, out=out, mass=mass, backend=backend)
        results.append((out, mass))
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)
