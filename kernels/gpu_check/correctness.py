"""Every Triton kernel against its reference on one device: names, and calls that raise if a kernel is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels import reference
from kernels.layout import FORMATS, INT4, INT8, K8V4, NATIVE
from kernels.triton import cases, checks
from kernels.triton.decode_attention import decode_attention_launcher
from kernels.triton.decode_plan import DecodeScratch, launch_plan, most_pieces

Check = Callable[[], float | None]

_LONG = cases.mixed_segments(1500, FORMATS, (64, 32, 128, 256, 16))
_SEQUENCES = [
    _LONG,
    cases.mixed_segments(1, (NATIVE,), (16,)),
    cases.mixed_segments(700, (INT4, NATIVE), (64, 32), hole=(32, 448)),
    cases.mixed_segments(4100, (K8V4, INT8, NATIVE), (32, 64)),
    cases.shared_prefix_segments(),
]
_NEW_TOKENS = [512, 1, 33, 1000, 7]
_RUNS = [(INT8, 512), (NATIVE, 256), (INT4, 512), (K8V4, 256), (NATIVE, 77)]


def first_checks(device: torch.device, *, mini: bool = False) -> Iterator[tuple[str, Check]]:
    """(name, check) of every kernel at the model shape that is timed. A check returns its error in tolerances, or None.

    ``mini``: few and small ones, for the interpreter.
    """
    host = torch.device("cpu")
    if mini:
        shape = cases.Geometry(torch.bfloat16, 64, kv_heads=1)
        yield "graph", partial(check_graph, shape, device, seed=0)
        yield f"copy_bytes {device.type}", partial(checks.check_copy, device, device, pinned=False, seed=0)
        return
    shape = cases.Geometry(torch.bfloat16, 128, kv_heads=2, group=4)
    yield f"decode graph {shape}", partial(check_graph, shape, device, seed=0)
    yield from _of_shape(shape, device, 0)
    for source, target in ((device, device), (host, device), (device, host)):
        for pinned in (True, False):
            name = f"copy_bytes {source.type} to {target.type}, host memory {'pinned' if pinned else 'pageable'}"
            yield name, partial(checks.check_copy, source, target, pinned=pinned, seed=1)


def more_checks(device: torch.device, *, mini: bool = False) -> Iterator[tuple[str, Check]]:
    """The same at other dtypes, head sizes and groups, where most time goes into compiling."""
    if mini:
        shape = cases.Geometry(torch.bfloat16, 64, kv_heads=1)
        yield f"recode {shape}", partial(checks.check_recode, shape, device, seed=0)
        return
    shapes = [cases.Geometry(torch.bfloat16, dim, group=group) for dim, group in ((64, 2), (80, 1), (96, 7), (256, 2))]
    shapes += [cases.Geometry(torch.float16, dim) for dim in (64, 128)]
    shapes += [cases.Geometry(torch.float32, dim) for dim in (64, 80, 128)]
    for seed, shape in enumerate(shapes, start=1):
        yield from _of_shape(shape, device, seed)


def _of_shape(shape: cases.Geometry, device: torch.device, seed: int) -> Iterator[tuple[str, Check]]:
    yield f"write_kv {shape}", partial(checks.check_write, shape, device, seed=seed)
    for scale in (1.0, 1e-5, 300.0):
        yield f"recode {shape} x {scale:g}", partial(checks.check_recode, shape, device, seed=seed, scale=scale)
    yield f"gather_kv {shape}", partial(checks.check_gather, shape, _LONG, device, seed=seed)
    for window in (0, 300):
        common = {"window": window, "seed": seed}
        decode = partial(checks.check_decode, shape, _SEQUENCES, device, **common)
        yield f"decode_attention {shape} window {window}", decode
        prefill = partial(checks.check_prefill, shape, _SEQUENCES, _NEW_TOKENS, device, **common)
        yield f"prefill_attention {shape} window {window}", prefill
        mass = partial(checks.check_mass, shape, _SEQUENCES, _NEW_TOKENS, device, last=64, **common)
        yield f"attention_mass {shape} window {window}", mass
    sizes = (256, 128, 64, 32, 16)
    yield f"block sizes {shape}", partial(checks.check_block_sizes, shape, _RUNS, sizes, device, seed=seed)


def check_graph(geometry: cases.Geometry, device: torch.device, *, seed: int) -> float:
    """One recorded decode, replayed for batches of other lengths, classes and padding; without CUDA, called again.

    Returns the largest error in tolerances.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = [
        [(300, FORMATS), (1, (NATIVE,)), (0, (NATIVE,))],
        [(70, (INT4, INT8)), (0, (NATIVE,)), (290, (NATIVE,))],
        [(0, (NATIVE,)), (0, (NATIVE,)), (600, (K8V4, NATIVE, INT8))],
    ]
    caches = []
    for batch in batches:
        segments = [cases.mixed_segments(max(1, tokens), formats, (32, 64)) for tokens, formats in batch]
        cache, _ = cases.random_cache(geometry, segments, generator, torch.device("cpu"))
        cache.num_entries[torch.tensor([tokens == 0 for tokens, _ in batch])] = 0
        caches.append(cache)
    width = max(cache.entries.shape[1] for cache in caches)
    arena = torch.empty(max(cache.arena.numel() for cache in caches), dtype=torch.uint8, device=device)
    entries = torch.zeros((3, width, 4), dtype=torch.int32, device=device)
    first = torch.zeros(3, dtype=torch.int32, device=device)
    held = cases.Cache(arena, geometry.shape, entries, torch.zeros(3, dtype=torch.int32, device=device))
    table = held.table([0, 0, 0])
    size = (3, geometry.kv_heads * geometry.group, geometry.head_dim)
    query = torch.randn(size, generator=generator).to(geometry.dtype)
    on_device = query.to(device)
    out = checks.poisoned(size, geometry.dtype, device)
    scratch = DecodeScratch.allocate(size, geometry.kv_heads, most_pieces(3, 600), device)
    first = table.query_first

    def launch() -> None:
        launch_plan(table.num_entries, table.query_first, scratch, window=0)
        decode_attention_launcher(
            on_device, arena, geometry.shape, 0, table,
            scale=0.1, window=0, out=out, scratch=scratch, programs=64,
        )  # fmt: skip

    replay = launch
    if device.type == "cuda":
        launch()  # compiles
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        replay = graph.replay
    worst = 0.0
    for batch, cache in zip(batches, caches, strict=True):
        arena[: cache.arena.numel()].copy_(cache.arena)
        entries[:, : cache.entries.shape[1]].copy_(cache.entries)
        held.num_entries.copy_(cache.num_entries)
        positions = [tokens - 1 for tokens, _ in batch]
        first.copy_(torch.tensor(positions, dtype=torch.int32))
        out.fill_(torch.nan)
        replay()
        want = torch.empty(size, dtype=torch.float64)
        reference.decode_attention(
            query, cache.arena, geometry.shape, 0, cache.table(positions),
            scale=0.1, window=0, out=want, dtype=torch.float64,
        )  # fmt: skip
        worst = max(worst, checks.compare(f"decode graph {geometry}", out, want, geometry.dtype))
    return worst
