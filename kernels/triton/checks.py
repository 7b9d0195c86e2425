"""Comparisons of every kernel with its reference: one set of checks for the GPU and the interpreter.

``kernels/gpu_check`` runs them on a card, the tests under ``TRITON_INTERPRET=1`` on a CPU. Caches are those of
`cases`; outputs hold NaN before a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import reference
from kernels.layout import CHUNK_TOKENS, NATIVE, OFFSET_UNIT, KVFormat
from kernels.reference.tolerances import attention_tolerance, mass_tolerance
from kernels.triton.attention_mass import attention_mass
from kernels.triton.cases import Geometry, Segment, build_cache, copy_rows, random_cache, random_kv, recode_jobs
from kernels.triton.copy_bytes import copy_bytes
from kernels.triton.decode_attention import decode_attention
from kernels.triton.gather import gather_kv
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.recode import recode
from kernels.triton.write_kv import write_kv


class MismatchError(AssertionError):
    """A kernel's result is not the reference's; the message says where and by how much."""


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)


def compare(what: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> float:
    """Largest error as a multiple of the tolerance; raises MismatchError when over 1 or not finite."""
    limit = attention_tolerance(dtype)
    error = (got.cpu().to(torch.float64) - want.cpu()).abs() / (limit.atol + limit.rtol * want.cpu().abs())
    worst = float(error.max()) if error.numel() else 0.0
    if not worst <= 1.0:
        raise MismatchError(f"{what}: error {worst:.3g} times the tolerance")
    return worst


def compare_mass(what: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> float:
    """As `compare`, for shares of attention. Chunks that get nothing must have exactly nothing."""
    got, limit = got.cpu(), mass_tolerance(dtype)
    error = (got.to(torch.float64) - want).abs() / (limit.atol + limit.rtol * want)
    worst = float(error.max()) if error.numel() else 0.0
    if not worst <= 1.0:
        raise MismatchError(f"{what}: error {worst:.3g} times the tolerance")
    if bool(got[want == 0].any()):
        raise MismatchError(f"{what}: evicted or hidden chunks have a share")
    return worst


def compare_bytes(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raises MismatchError unless two tensors have the same bytes."""
    got, want = (t.cpu().contiguous().view(torch.uint8).flatten() for t in (got, want))
    if not torch.equal(got, want):
        raise MismatchError(f"{what}: {int((got != want).sum())} of {want.numel()} bytes differ")


def check_decode(
    geometry: Geometry, sequences: Sequence[Sequence[Segment]], device: torch.device, *, window: int, seed: int
) -> float:
    """Decode over ``sequences`` against the float64 reference; each query is at its last stored position.

    Once with and once without the share of attention: the output must be the same to the bit.
    """
    generator = torch.Generator().manual_seed(seed)
    cache, lengths = random_cache(geometry, sequences, generator, device)
    heads = geometry.kv_heads * geometry.group
    query = torch.randn((len(sequences), heads, geometry.head_dim), generator=generator).to(geometry.dtype)
    table = cache.table([length - 1 for length in lengths])
    out = poisoned(query.shape, geometry.dtype, device)
    scale, layer = geometry.head_dim**-0.5, geometry.layers - 1
    arguments = (query.to(device), cache.arena, cache.shape, layer, table)
    decode_attention(*arguments, scale=scale, window=window, out=out)
    chunks = max(lengths) // CHUNK_TOKENS + 3
    mass = poisoned((len(sequences), geometry.kv_heads, chunks), torch.float32, device)
    again = poisoned(query.shape, geometry.dtype, device)
    decode_attention(*arguments, scale=scale, window=window, out=again, mass=mass)
    compare_bytes(f"decode_attention {geometry} window {window} with mass", again, out)
    want = torch.empty(query.shape, dtype=torch.float64)
    want_mass = torch.empty(mass.shape, dtype=torch.float64)
    host = cache.cpu()
    reference.decode_attention(
        query, host.arena, host.shape, layer, host.table([length - 1 for length in lengths]),
        scale=scale, window=window, out=want, mass=want_mass, dtype=torch.float64,
    )  # fmt: skip
    compare_mass(f"mass of decode_attention {geometry} window {window}", mass, want_mass, geometry.dtype)
    return compare(f"decode_attention {geometry} window {window}", out, want, geometry.dtype)


def check_mass(
    geometry: Geometry,
    sequences: Sequence[Sequence[Segment]],
    chunks: Sequence[int],
    device: torch.device,
    *,
    last: int,
    window: int,
    seed: int,
) -> float:
    """Share of attention of the last queries of each sequence's last ``chunks`` tokens, against the reference."""
    generator = torch.Generator().manual_seed(seed)
    cache, lengths = random_cache(geometry, sequences, generator, device)
    firsts = [length - chunk for length, chunk in zip(lengths, chunks, strict=True)]
    heads = geometry.kv_heads * geometry.group
    query = torch.randn((sum(chunks), heads, geometry.head_dim), generator=generator).to(geometry.dtype)
    starts = torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0).to(torch.int32)
    mass = poisoned((len(sequences), geometry.kv_heads, max(lengths) // CHUNK_TOKENS + 3), torch.float32, device)
    scale, layer = geometry.head_dim**-0.5, geometry.layers - 1
    attention_mass(
        query.to(device), cache.arena, cache.shape, layer, cache.table(firsts), starts.to(device),
        scale=scale, window=window, last=last, mass=mass,
    )  # fmt: skip
    want = torch.empty(mass.shape, dtype=torch.float64)
    host = cache.cpu()
    reference.attention_mass(
        query, host.arena, host.shape, layer, host.table(firsts), starts,
        scale=scale, window=window, last=last, mass=want, dtype=torch.float64,
    )  # fmt: skip
    return compare_mass(f"attention_mass {geometry} window {window} last {last}", mass, want, geometry.dtype)


def check_prefill(
    geometry: Geometry,
    sequences: Sequence[Sequence[Segment]],
    chunks: Sequence[int],
    device: torch.device,
    *,
    window: int,
    seed: int,
) -> float:
    """Prefill of each sequence's last ``chunks`` tokens against the float64 reference."""
    generator = torch.Generator().manual_seed(seed)
    cache, lengths = random_cache(geometry, sequences, generator, device)
    firsts = [length - chunk for length, chunk in zip(lengths, chunks, strict=True)]
    heads = geometry.kv_heads * geometry.group
    query = torch.randn((sum(chunks), heads, geometry.head_dim), generator=generator).to(geometry.dtype)
    starts = torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0).to(torch.int32)
    out = poisoned(query.shape, geometry.dtype, device)
    scale, layer = geometry.head_dim**-0.5, geometry.layers - 1
    prefill_attention(
        query.to(device), cache.arena, cache.shape, layer, cache.table(firsts), starts.to(device),
        scale=scale, window=window, out=out,
    )  # fmt: skip
    want = torch.empty(query.shape, dtype=torch.float64)
    host = cache.cpu()
    reference.prefill_attention(
        query, host.arena, host.shape, layer, host.table(firsts), starts,
        scale=scale, window=window, out=want, dtype=torch.float64,
    )  # fmt: skip
    return compare(f"prefill_attention {geometry} window {window}", out, want, geometry.dtype)


def check_block_sizes(
    geometry: Geometry, runs: Sequence[tuple[KVFormat, int]], sizes: Sequence[int], device: torch.device, *, seed: int
) -> None:
    """The same stored values in other block sizes must give the same decode and prefill output, bit for bit.

    ``runs``: (format, tokens) in position order, tokens a multiple of every size (the last one may be any number).
    """
    generator = torch.Generator().manual_seed(seed)
    length = sum(tokens for _, tokens in runs)
    kv = random_kv(geometry, length + max(sizes), generator)
    heads = geometry.kv_heads * geometry.group
    query = torch.randn((4, heads, geometry.head_dim), generator=generator).to(geometry.dtype).to(device)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    decoded: list[torch.Tensor] = []
    prefilled: list[torch.Tensor] = []
    masses: list[torch.Tensor] = []
    for size in sizes:
        segments, first = [], 0
        for kv_format, tokens in runs:
            segments.append(Segment(kv_format, max(size, kv_format.tile_tokens), first, tokens))
            first += tokens
        cache = build_cache(geometry, [(kv, segments)], generator, device)
        out = poisoned(query.shape, geometry.dtype, device)
        mass = poisoned((2, 1, geometry.kv_heads, length // CHUNK_TOKENS + 1), torch.float32, device)
        decode_attention(
            query[:1], cache.arena, cache.shape, 0, cache.table([length - 1]),
            scale=0.1, window=0, out=out[:1], mass=mass[0],
        )  # fmt: skip
        attention_mass(
            query, cache.arena, cache.shape, 0, cache.table([length - 4]), starts, scale=0.1, last=3, mass=mass[1]
        )
        masses.append(mass)
        decoded.append(out[:1])
        out = poisoned(query.shape, geometry.dtype, device)
        prefill_attention(
            query, cache.arena, cache.shape, 0, cache.table([length - 4]), starts, scale=0.1, window=0, out=out
        )
        prefilled.append(out)
    for size, decode, prefill, mass in zip(sizes[1:], decoded[1:], prefilled[1:], masses[1:], strict=True):
        compare_bytes(f"attention mass {geometry}, blocks of {size} against {sizes[0]}", mass, masses[0])
        compare_bytes(f"decode_attention {geometry}, blocks of {size} against {sizes[0]}", decode, decoded[0])
        compare_bytes(f"prefill_attention {geometry}, blocks of {size} against {sizes[0]}", prefill, prefilled[0])


def check_write(geometry: Geometry, device: torch.device, *, seed: int) -> None:
    """Writing tokens in any order, from strided inputs, changes exactly the reference's bytes."""
    generator = torch.Generator().manual_seed(seed)
    shape, tokens, size = geometry.shape, 19, 32
    units = shape.block_bytes(NATIVE, size) // OFFSET_UNIT
    places = torch.randperm(3 * size, generator=generator)[:tokens]
    slots = torch.stack((1 + places // size * units, places % size), dim=1).to(torch.int32)
    fused = torch.randn((tokens, 3, geometry.kv_heads, geometry.head_dim), generator=generator).to(geometry.dtype)
    want = torch.full(((1 + 3 * units) * OFFSET_UNIT,), 255, dtype=torch.uint8)
    got = want.to(device, copy=True)
    on_device = fused.to(device)
    for layer in range(geometry.layers):
        reference.write_kv(want, shape, layer, fused[:, 1], fused[:, 2], slots)
        write_kv(got, shape, layer, on_device[:, 1], on_device[:, 2], slots.to(device))
    compare_bytes(f"write_kv {geometry}", got, want)


def check_recode(geometry: Geometry, device: torch.device, *, seed: int, scale: float = 1.0) -> None:
    """Every allowed pair of formats gives the reference's bytes, and nothing else of the arena changes."""
    generator = torch.Generator().manual_seed(seed)
    want, jobs, _ = recode_jobs(geometry, generator, scale)
    got = want.to(device, copy=True)
    reference.recode(want, geometry.shape, jobs, native_dtype=geometry.dtype)
    recode(got, geometry.shape, jobs.to(device), native_dtype=geometry.dtype)
    compare_bytes(f"recode {geometry}, values times {scale}", got, want)


def check_copy(source_device: torch.device, target_device: torch.device, *, pinned: bool, seed: int) -> None:
    """Runs of bytes of every alignment arrive, and nothing else of the target changes. ``pinned``: of host memory."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (40_000,), dtype=torch.uint8, generator=generator)
    rows, size = copy_rows(generator, len(data))
    want = torch.full((size,), 171, dtype=torch.uint8)
    source, target = (
        tensor.pin_memory() if pinned and device.type == "cpu" else tensor.to(device, copy=True)
        for tensor, device in ((data, source_device), (want, target_device))
    )
    reference.copy_bytes(data, want, rows)
    copy_bytes(source, target, rows)
    if target_device.type == "cpu" and source_device.type == "cuda":
        torch.cuda.synchronize(source_device)
    compare_bytes(f"copy_bytes {source_device} to {target_device}", target, want)


def check_gather(geometry: Geometry, segments: Sequence[Segment], device: torch.device, *, seed: int) -> None:
    """Gathered keys and values equal the reference's, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    cache, _ = random_cache(geometry, [segments], generator, device)
    host, count = cache.cpu(), int(cache.num_entries[0])
    for layer in range(geometry.layers):
        got = gather_kv(cache.arena, cache.shape, layer, cache.entries[0], count, native_dtype=geometry.dtype)
        want = reference.gather_kv(host.arena, host.shape, layer, host.entries[0], count, native_dtype=geometry.dtype)
        for name, mine, theirs in zip(("keys", "values"), got, want, strict=True):
            compare_bytes(f"gather_kv {geometry}, {name}", mine, theirs)
