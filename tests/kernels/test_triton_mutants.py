"""Kernels broken on purpose: each is run from its own source with one change, and a check must refuse it.

``NAN``: the change reads, or leaves, poison. ``WRONG``: all numbers are finite, and the float64 reference differs.
``BYTES``: what lies in memory differs. Run by ``test_triton_interpreter.py``, in its process of interpreted kernels.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only)")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs this with TRITON_INTERPRET=1", allow_module_level=True)

from kernels.layout import INT4, INT8, NATIVE
from kernels.triton import (
    attention_mass,
    checks,
    copy_bytes,
    decode_attention,
    decode_merge,
    decode_plan,
    decode_split,
    gather,
    mass_passes,
    prefill_attention,
    quantise,
    recode,
    tiles,
    window,
    write_kv,
)
from kernels.triton.cases import Geometry, Segment, mixed_segments

CPU = torch.device("cpu")
SMALL = Geometry(torch.float32, 64, layers=1)
ODD = Geometry(torch.float32, 80, kv_heads=3, layers=1)  # padded to 4 heads and 128 channels
# The first block ends before its room does; what lies behind is NaN.
SEQUENCES = [[Segment(NATIVE, 32, 0, 20), Segment(INT8, 32, 32, 20)], mixed_segments(300, (INT4, NATIVE), (32,))]
NAN, WRONG, BYTES = "error nan times", r"error [\d.e+]+ times", "bytes differ"


def decode() -> None:
    checks.check_decode(SMALL, SEQUENCES, CPU, window=0, seed=1)


def prefill() -> None:
    checks.check_prefill(SMALL, SEQUENCES, [9, 3], CPU, window=0, seed=2)


def mass() -> None:
    checks.check_mass(SMALL, SEQUENCES, [9, 3], CPU, last=4, window=0, seed=3)


def write() -> None:
    checks.check_write(ODD, CPU, seed=4)


def convert() -> None:
    checks.check_recode(SMALL, CPU, seed=5)


def collect() -> None:
    checks.check_gather(SMALL, SEQUENCES[1], CPU, seed=6)


def move() -> None:
    checks.check_copy(CPU, CPU, pinned=False, seed=7)


@dataclass(frozen=True)
class Mutant:
    """``old`` in a module's source becomes ``new``; ``users`` then call the mutant's ``name``."""

    check: Callable[[], object]
    module: ModuleType
    name: str
    users: tuple[ModuleType, ...]
    old: str
    new: str
    caught: str

    def __str__(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}: {self.old} -> {self.new}"


MUTANTS = [
    Mutant(
        decode, decode_plan, "_decode_plan_kernel", (decode_plan,),
        "sequence + tl.zeros([_LANES], tl.int32)", "tl.zeros([_LANES], tl.int32)", WRONG,
    ),
    Mutant(
        decode, decode_split, "_decode_split_kernel", (decode_attention,),
        "stop = tl.minimum((split + 1) * SPLIT, query_position + 1)",
        "stop = tl.minimum((split + 1) * SPLIT, query_position)", WRONG,
    ),
    Mutant(
        decode, window, "attend_window", (decode_split,),
        "total = total * decay + tl.sum(probabilities, axis=1)", "total = total + tl.sum(probabilities, axis=1)", WRONG,
    ),
    Mutant(
        decode, decode_merge, "_decode_merge_kernel", (decode_attention,),
        "weights = tl.exp2(peaks - shift)", "weights = tl.exp2(peaks - peaks)", WRONG,
    ),
    Mutant(
        decode, decode_merge, "_decode_merge_kernel", (decode_attention,),
        "tl.store(at, merged.to(out.dtype.element_ty), mask=channel < DIM)",
        "tl.store(at, merged.to(out.dtype.element_ty), mask=channel < DIM - 1)", NAN,
    ),
    Mutant(
        decode, decode_merge, "_decode_mass_kernel", (decode_attention,),
        "tl.store(at, shares / GROUP", "tl.store(at, shares", WRONG,
    ),
    Mutant(
        prefill, prefill_attention, "_prefill_kernel", (prefill_attention,),
        "query_position = first_query + row // GROUP", "query_position = first_query + row // GROUP + 1", WRONG,
    ),
    Mutant(
        mass, mass_passes, "_mass_totals_kernel", (attention_mass,),
        "peak = new_peak", "peak = new_peak + 1.0", WRONG,
    ),
    Mutant(
        mass, mass_passes, "_mass_shares_kernel", (attention_mass,),
        "tl.sum(late, axis=0) / (count * GROUP)", "tl.sum(early, axis=0) / (count * GROUP)", WRONG,
    ),
    Mutant(
        write, write_kv, "_write_kv_kernel", (write_kv,),
        "mask = (head < KV_HEADS) & (channel < DIM)", "mask = (head < KV_HEADS) & (channel < DIM + 1)", BYTES,
    ),
    Mutant(
        convert, quantise, "store_quantised", (recode,),
        "tl.floor(ratio * 2.0 + 0.5)", "tl.floor(ratio * 2.0 + 0.25)", BYTES,
    ),
    Mutant(
        collect, gather, "_gather_kv_kernel", (gather,),
        "code_high = packed >> 4", "code_high = packed >> 3", BYTES,
    ),
    Mutant(
        move, copy_bytes, "_copy_bytes_kernel", (copy_bytes,),
        "mask = done + lane < words", "mask = done + lane <= words", BYTES,
    ),
]  # fmt: skip


def broken(mutant: Mutant, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    source = Path(str(mutant.module.__file__)).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, "the mutant's line is gone, or is no longer the only one"
    file = folder / "mutant.py"
    file.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutant", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_broken_kernel_is_caught(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = broken(mutant, tmp_path, monkeypatch)
    for user in mutant.users:
        monkeypatch.setattr(user, mutant.name, getattr(module, mutant.name))
    with pytest.raises(checks.MismatchError, match=mutant.caught):
        mutant.check()


def test_a_kernel_that_reads_past_valid_tokens_is_caught_by_the_poison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The helper that decode, prefill and mass share says that a block has one token more.
    line = "return offset, code, first, first + valid"
    longer = broken(Mutant(decode, tiles, "", (), line, line + " + 1", NAN), tmp_path, monkeypatch)
    for check, user in ((decode, decode_split), (prefill, prefill_attention), (mass, mass_passes)):
        with monkeypatch.context() as patch:
            patch.setattr(user, "load_entry", longer.load_entry)
            with pytest.raises(checks.MismatchError, match=NAN):
                check()


@pytest.mark.parametrize("check", [decode, prefill, mass, write, convert, collect, move])
def test_the_kernels_as_they_are_pass_the_same_checks(check: Callable[[], object]) -> None:
    check()
