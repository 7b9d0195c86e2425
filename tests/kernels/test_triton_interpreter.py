"""The Triton kernels under Triton's interpreter on the CPU, against the float64 references.

Whether kernels are interpreted is decided when triton is imported, for the whole process. So this file runs itself
once more in a process of its own with TRITON_INTERPRET=1, where it defines the actual tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only)")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).resolve().parents[2]

if not INTERPRETED:

    @pytest.mark.timeout(900)
    def test_kernels_agree_with_references_under_the_interpreter() -> None:
        here = Path(__file__).resolve()
        files = [str(here), str(here.with_name("test_triton_mutants.py"))]
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *files]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=880, check=False
        )
        print(done.stdout[-2000:])
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

else:
    from dataclasses import fields, replace

    from kernels import ops, reference
    from kernels.layout import FORMATS, INT4, INT8, K8V4, NATIVE
    from kernels.table import TableView
    from kernels.triton import cases, checks, decode_plan
    from kernels.triton import copy_bytes as copying
    from kernels.triton.attention_mass import attention_mass
    from kernels.triton.cases import Geometry, Segment
    from kernels.triton.decode_attention import decode_attention, decode_attention_launcher
    from kernels.triton.decode_plan import DecodeScratch, launch_plan, most_pieces

    CPU = torch.device("cpu")
    F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

    # Pairwise: every dtype with every kind of head size, grouping and window at least once.
    ATTENTION = [
        (Geometry(F32, 64, kv_heads=2, group=2), 0),
        (Geometry(F32, 80, kv_heads=1, group=7), 40),
        (Geometry(BF16, 96, kv_heads=2, group=1), 40),
        (Geometry(BF16, 128, kv_heads=2, group=4), 0),
        (Geometry(F16, 256, kv_heads=1, group=2), 33),
        (Geometry(F16, 80, kv_heads=2, group=1), 0),
    ]
    SEQUENCES = [
        cases.mixed_segments(290, FORMATS, (32, 64, 16, 128)),
        cases.mixed_segments(1, (NATIVE,), (16,)),
        cases.mixed_segments(289, (INT4, NATIVE), (32, 16), hole=(32, 176)),
        cases.shared_prefix_segments(),
    ]

    SHORT = [Segment(NATIVE, 32, 0, 20), Segment(INT8, 32, 32, 20)]

    @pytest.mark.parametrize(("geometry", "window"), ATTENTION, ids=str)
    def test_decode_matches_reference(geometry: Geometry, window: int) -> None:
        checks.check_decode(geometry, SEQUENCES, CPU, window=window, seed=geometry.head_dim + window)

    @pytest.mark.parametrize(("geometry", "window"), ATTENTION, ids=str)
    def test_prefill_matches_reference(geometry: Geometry, window: int) -> None:
        checks.check_prefill(geometry, SEQUENCES, [37, 1, 3, 21], CPU, window=window, seed=geometry.head_dim - window)

    @pytest.mark.parametrize(("geometry", "window"), ATTENTION[1:4], ids=str)
    def test_mass_matches_reference(geometry: Geometry, window: int) -> None:
        new, seed = [37, 1, 3, 21], geometry.head_dim + 1
        checks.check_mass(geometry, SEQUENCES, new, CPU, last=16, window=window, seed=seed)

    def test_mass_of_padding_and_of_no_queries_is_zero() -> None:
        generator = torch.Generator().manual_seed(6)
        geometry = Geometry(F32, 64, layers=1)
        stored = [(cases.random_kv(geometry, 64, generator), cases.mixed_segments(40, (NATIVE,), (16,)))] * 3
        cache = cases.build_cache(geometry, stored, generator, CPU)
        table = cache.table([39, 999, 39])
        table.num_entries[1] = 0
        query = torch.randn((3, 4, 64), generator=generator)
        mass = checks.poisoned((2, 3, 3), F32, CPU).transpose(0, 1)
        decode_attention(query, cache.arena, cache.shape, 0, table, scale=0.1, out=torch.empty_like(query), mass=mass)
        torch.testing.assert_close(mass.sum(dim=2), torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]))
        mass.fill_(torch.nan)
        starts = torch.tensor([0, 1, 3, 3], dtype=torch.int32)
        attention_mass(query, cache.arena, cache.shape, 0, table, starts, scale=0.1, last=64, mass=mass)
        torch.testing.assert_close(mass.sum(dim=2), torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))

    def test_prefill_of_a_whole_prompt_has_no_context() -> None:
        sequences = [cases.mixed_segments(length, (NATIVE,), (32, 16)) for length in (17, 33)]
        checks.check_prefill(Geometry(BF16, 64), sequences, [17, 33], CPU, window=0, seed=5)

    @pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
    def test_block_size_changes_no_bit(dtype: torch.dtype) -> None:
        runs = [(INT8, 64), (NATIVE, 64), (INT4, 64), (K8V4, 64), (NATIVE, 45)]
        checks.check_block_sizes(Geometry(dtype, 64, kv_heads=1), runs, (64, 32, 16), CPU, seed=3)

    @pytest.mark.parametrize(
        ("geometry", "scale"),
        [
            (Geometry(F32, 80, layers=1), 1.0),
            (Geometry(F32, 48, layers=1), 5e37),
            (Geometry(BF16, 96, layers=1), 1.0),
            (Geometry(BF16, 64, layers=1), 5e37),
            (Geometry(F16, 128, layers=1), 1.0),
            (Geometry(F16, 80, layers=1), 9000.0),
        ],
        ids=str,
    )
    def test_recode_gives_the_reference_bytes(geometry: Geometry, scale: float) -> None:
        checks.check_recode(geometry, CPU, seed=11, scale=scale)

    @pytest.mark.parametrize("geometry", [Geometry(F32, 96), Geometry(BF16, 80), Geometry(F16, 64)], ids=str)
    def test_write_gives_the_reference_bytes(geometry: Geometry) -> None:
        checks.check_write(geometry, CPU, seed=2)

    @pytest.mark.parametrize("geometry", [Geometry(F32, 80, layers=1), Geometry(BF16, 96, layers=1)], ids=str)
    def test_gather_gives_the_reference_values(geometry: Geometry) -> None:
        checks.check_gather(geometry, cases.mixed_segments(250, FORMATS, (32, 64, 16)), CPU, seed=4)
        checks.check_gather(geometry, cases.shared_prefix_segments(), CPU, seed=4)

    def test_padding_sequence_gets_zeros_and_strided_inputs_work() -> None:
        generator = torch.Generator().manual_seed(1)
        geometry = Geometry(F32, 64)
        cache = cases.build_cache(
            geometry,
            [(cases.random_kv(geometry, 64, generator), cases.mixed_segments(40, (NATIVE,), (16,)))],
            generator,
            CPU,
        )
        wide = torch.full((2, 9, 4), 1 << 20, dtype=torch.int32)
        wide[:1, : cache.entries.shape[1]] = cache.entries
        count = int(cache.num_entries[0])
        table = TableView(
            wide[:, :count], torch.tensor([count, 0], dtype=torch.int32), torch.tensor([39, 5000], dtype=torch.int32)
        )
        query = torch.randn((2, 64, 4), generator=generator).transpose(1, 2)
        out = checks.poisoned((2, 64, 4), F32, CPU).transpose(1, 2)
        decode_attention(query, cache.arena, cache.shape, 0, table, scale=0.125, out=out)
        assert torch.equal(out[1], torch.zeros(4, 64))
        alone = checks.poisoned((1, 4, 64), F32, CPU)
        decode_attention(query[:1].contiguous(), cache.arena, cache.shape, 0, cache.table([39]), scale=0.125, out=alone)
        assert torch.equal(out[0], alone[0])
        assert alone.isfinite().all()

    def test_one_scratch_serves_batches_in_turn_and_any_number_of_programs() -> None:
        """As a recorded CUDA graph would: the same tensors and grid for every batch, whatever they held before."""
        generator = torch.Generator().manual_seed(12)
        geometry = Geometry(BF16, 64, kv_heads=2, group=2)
        query = torch.randn((4, 4, 64), generator=generator).to(BF16)
        scratch = DecodeScratch.allocate((4, 4, 64), 2, most_pieces(4, 600), CPU, mass=True)
        poison(scratch)
        lengths = [(600, 1, 300, 0), (0, 0, 0, 5), (0, 0, 0, 0), (256, 257, 255, 512)]
        for tokens, programs, window in zip(lengths, (3, 64, 2, 7), (0, 0, 0, 100), strict=True):
            sequences = [cases.mixed_segments(max(count, 1), FORMATS[: 1 + programs % 4], (64, 32)) for count in tokens]
            cache, _ = cases.random_cache(geometry, sequences, generator, CPU)
            table = cache.table([count - 1 if count else 5000 for count in tokens])
            table.num_entries[torch.tensor(tokens) == 0] = 0
            out, mass = checks.poisoned((4, 4, 64), BF16, CPU), checks.poisoned((4, 2, 40), F32, CPU)
            launch_plan(table.num_entries, table.query_first, scratch, window=window)
            decode_attention_launcher(
                query, cache.arena, cache.shape, 1, table,
                scale=0.125, window=window, out=out, scratch=scratch, programs=programs, mass=mass,
            )  # fmt: skip
            want, want_mass = torch.empty(query.shape, dtype=F64), torch.empty(mass.shape, dtype=F64)
            reference.decode_attention(
                query, cache.arena, cache.shape, 1, table,
                scale=0.125, window=window, out=want, mass=want_mass, dtype=F64,
            )  # fmt: skip
            checks.compare(f"lengths {tokens}", out, want, BF16)
            checks.compare_mass(f"lengths {tokens}", mass, want_mass, BF16)

    def poison(scratch: DecodeScratch) -> None:
        assert scratch.mass is not None
        tensors = [getattr(scratch, field.name) for field in fields(scratch)]
        tensors += [getattr(scratch.mass, field.name) for field in fields(scratch.mass)]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(torch.nan if tensor.is_floating_point() else (1 << 31) - 1)

    def test_scratch_too_small_leaves_pieces_out_and_writes_nowhere_else() -> None:
        generator = torch.Generator().manual_seed(13)
        geometry = Geometry(F32, 64, kv_heads=1, layers=1)
        cache, _ = cases.random_cache(geometry, [cases.mixed_segments(600, (NATIVE,), (64,))] * 2, generator, CPU)
        query = torch.randn((2, 2, 64), generator=generator)
        whole = DecodeScratch.allocate((2, 2, 64), 1, 6, CPU)
        guard = 77
        whole.items.fill_(guard)
        short = replace(whole, items=whole.items[:4])
        out = checks.poisoned((2, 2, 64), F32, CPU)
        table = cache.table([599, 599])
        launch_plan(table.num_entries, table.query_first, short, window=0)
        decode_attention_launcher(
            query, cache.arena, cache.shape, 0, table,
            scale=0.1, window=0, out=out, scratch=short, programs=3,
        )  # fmt: skip
        assert whole.items.tolist() == [0, 0, 0, 1, guard, guard]
        assert short.starts.tolist() == [0, 3, 4]

    def test_layers_that_share_a_plan_get_the_same_bits_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
        generator, geometry = torch.Generator().manual_seed(14), Geometry(BF16, 64, kv_heads=2, group=2)
        sequences = [cases.mixed_segments(tokens, FORMATS, (64, 32)) for tokens in (290, 1, 40)]
        cache, lengths = cases.random_cache(geometry, sequences, generator, CPU)
        query = torch.randn((3, 4, 64), generator=generator).to(BF16)
        table, planned = cache.table([length - 1 for length in lengths]), []
        launch = decode_plan.launch_plan

        def counted(*arguments: Any, **options: Any) -> None:
            planned.append(options["window"])
            launch(*arguments, **options)

        monkeypatch.setattr(decode_plan, "launch_plan", counted)
        plan = ops.plan_decode(table, cache.shape, heads=4, native_dtype=BF16, window=70, mass=True, backend="triton")
        assert planned == [70]
        got = [(checks.poisoned((3, 4, 64), BF16, CPU), checks.poisoned((3, 2, 20), F32, CPU)) for _ in range(4)]
        for layer in range(2):
            arguments = (query, cache.arena, cache.shape, layer, table)
            for (out, mass), given in zip(got[2 * layer : 2 * layer + 2], (plan, None), strict=True):
                options: dict[str, Any] = {"scale": 0.125, "window": 70, "out": out, "mass": mass, "plan": given}
                ops.decode_attention(*arguments, **options, backend="triton")
        assert planned == [70] * 3
        for layer in range(2):
            for mine, alone in zip(got[2 * layer], got[2 * layer + 1], strict=True):
                checks.compare_bytes(f"layer {layer}", mine, alone)
        assert not torch.equal(got[0][0], got[2][0])

    def test_dispatch_reaches_these_kernels() -> None:
        generator = torch.Generator().manual_seed(9)
        geometry = Geometry(BF16, 64, layers=1)
        segments = cases.mixed_segments(40, (NATIVE,), (32,))
        cache = cases.build_cache(geometry, [(cases.random_kv(geometry, 64, generator), segments)], generator, CPU)
        query = torch.randn((1, 4, 64), generator=generator).to(BF16)
        through, direct = checks.poisoned((1, 4, 64), BF16, CPU), checks.poisoned((1, 4, 64), BF16, CPU)
        arguments = (query, cache.arena, cache.shape, 0, cache.table([39]))
        ops.decode_attention(*arguments, scale=0.125, out=through, backend="triton")
        decode_attention(*arguments, scale=0.125, out=direct)
        checks.compare_bytes("through ops", through, direct)

    @pytest.mark.parametrize("seed", range(3))
    def test_copies_arrive_and_touch_nothing_else(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        checks.check_copy(CPU, CPU, pinned=False, seed=seed)
        # As if the one or the other were host memory that a device cannot reach.
        for unreachable in (0, 1):
            answers = iter([unreachable != 0, unreachable != 1])
            monkeypatch.setattr(copying, "_reachable", lambda _, answers=answers: next(answers))
            checks.check_copy(CPU, CPU, pinned=False, seed=seed)
            monkeypatch.undo()

    def test_comparisons_can_fail() -> None:
        right = torch.zeros(3, dtype=torch.float64)
        for wrong in (torch.tensor([0.0, 0.0, 1e-4]), torch.tensor([0.0, float("nan"), 0.0])):
            with pytest.raises(checks.MismatchError):
                checks.compare("x", wrong, right, F32)
        with pytest.raises(checks.MismatchError):
            checks.compare_bytes("x", torch.tensor([0.0]), torch.tensor([-0.0]))
