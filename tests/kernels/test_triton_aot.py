"""The Triton kernels compile for real GPUs without one, and keep their values in registers."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("triton is interpreting in this process", allow_module_level=True)

from kernels.aot import compile as compiling
from kernels.aot.compile import blocks_per_multiprocessor, compile_variant
from kernels.aot.variants import variants

TYPICAL = {variant.kernel: variant for variant in variants(torch.bfloat16, 64, 2)}


@pytest.fixture(autouse=True)
def _fresh_compiler_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # A kernel found in the user's cache would not be compiled, and a read-only home must not matter.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize("kernel", sorted(TYPICAL))
def test_compiles_for_sm_90_without_spills(kernel: str) -> None:
    report = compile_variant(TYPICAL[kernel], 90)
    print(report)
    assert report.registers <= 255
    assert report.spill_bytes == 0
    assert report.blocks >= 2


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("kernel", ["decode_split", "split_mass", "mass_shares", "prefill"])
def test_attention_of_a_large_model_leaves_room_for_two_blocks(kernel: str, architecture: int) -> None:
    kernels = variants(torch.bfloat16, 128, 4, architecture=architecture)
    report = compile_variant(next(variant for variant in kernels if variant.kernel == kernel), architecture)
    print(report)
    assert not report.is_bad
    assert not report.accepted


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "blocks"),
    [(168, 4, 9216, 3), (169, 4, 9216, 2), (255, 8, 9216, 1), (128, 8, 120_000, 1), (32, 4, 0, 12), (16, 1, 3072, 24)],
)
def test_blocks_per_multiprocessor(registers: int, warps: int, shared: int, blocks: int) -> None:
    assert blocks_per_multiprocessor(89, registers, warps, min(shared, 99 << 10)) == blocks


def test_spills_are_seen() -> None:
    # 512 live floats a thread: ptxas must report that they do not fit.
    lines = [".version 8.0", ".target sm_80", ".address_size 64", ".visible .entry k(.param .u64 p) {"]
    lines += [".reg .f32 %f<600>; .reg .b64 %a<3>;", "ld.param.u64 %a1, [p];", "cvta.to.global.u64 %a2, %a1;"]
    lines += [f"ld.volatile.global.f32 %f{i}, [%a2+{4 * i}];" for i in range(512)]
    lines += [f"st.volatile.global.f32 [%a2+{4 * i}], %f{511 - i};" for i in range(512)]
    registers, spills, stack = compiling._assemble("\n".join([*lines, "ret; }", ""]), 80)
    assert registers == 255
    assert spills > 0
    assert stack > 0
