"""`kernels.gpu_check` without a GPU: a rehearsal under the interpreter, going on after a stop, its summary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.gpu_check import __main__ as command
from kernels.gpu_check.report import Journal, summary, table

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_cuda_device_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = tmp_path / "deep" / "check"
    assert command.main(["--out", str(target)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "no CUDA device" in printed.err
    assert not target.parent.exists()


def rehearse(target: Path, *more: str) -> tuple[int, dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kernels.gpu_check", "--mini", "--out", str(target), *more]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in {0, 1}, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_rehearsal_runs_every_check_and_point_and_a_second_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (Linux only)")
    target = tmp_path / "check"
    code, result = rehearse(target)
    assert (code, result["failures"], result["left"]) == (0, [], 0)
    assert not [row for row in result["rows"] if "skipped" in row], result["rows"]
    calls = {row["call"] for row in result["rows"] if "call" in row}
    assert calls == {"decode", "prefill", "recode", "attention_mass", "write_kv"}
    assert sum(row.get("call") == "decode" for row in result["rows"]) == 2 * 2 * 4
    assert "interpreted" in target.with_suffix(".md").read_text()
    assert json.loads(target.with_suffix(".json").read_text()) == result
    # Cut in the middle of a line: what was whole is kept, and nothing is measured twice.
    lines = target.with_suffix(".jsonl").read_text().splitlines(keepends=True)
    target.with_suffix(".jsonl").write_text("".join(lines[:-1]))
    code, again = rehearse(target, "--budget", "0")
    assert (code, again["left"]) == (0, 1)
    assert again["rows"] == result["rows"][:-1]


def test_a_wrong_kernel_is_reported_and_nothing_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / "x.jsonl", {"sources": "a"})
    journal.open()

    def wrong() -> float:
        raise AssertionError("3 bytes differ")

    run = command._Run(torch.device("cpu"), journal, mini=True, until=1.0, now=iter((0.0, 0.0, 2.0)).__next__)
    assert run._check([("a", wrong), ("b", lambda: 0.5), ("c", lambda: None)]) == 1
    assert run._is_wrong()
    assert journal.rows["check a"]["failure"] == "AssertionError: 3 bytes differ"
    assert journal.rows["check b"]["error_in_tolerances"] == 0.5
    assert "FAIL" in capsys.readouterr().out


def test_journal_starts_anew_for_other_sources_and_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    journal = Journal(path, {"sources": "a"})
    journal.open()
    journal.add("one", {"us": 1})
    same = Journal(path, {"sources": "a"})
    same.open()
    assert same.rows == {"one": {"key": "one", "us": 1}}
    other = Journal(path, {"sources": "b"})
    other.open()
    assert other.rows == {}
    path.write_text('{"sources": "a"}\n{"key": "one", "us": 1}\n{"key": "tw')
    torn = Journal(path, {"sources": "a"})
    torn.open()
    assert torn.rows == {"one": {"key": "one", "us": 1}}


def test_summary_takes_the_worst_of_the_promised_points() -> None:
    def row(name: str, size: int, context: int, batch: int, micros: float, share: float) -> dict[str, Any]:
        return {
            "call": "decode", "format": name, "block_size": size, "context": context, "batch": batch,
            "us": micros, "share_of_copy": share,
        }  # fmt: skip

    rows = [
        row("native", 64, 8192, 16, 50.0, 0.9),
        row("native", 64, 32768, 16, 100.0, 0.86),
        row("native", 16, 32768, 16, 110.0, 0.5),
        row("native", 64, 32768, 1, 30.0, 0.2),
        row("int4", 64, 32768, 16, 40.0, 0.65),
        row("int4", 64, 32768, 1, 10.0, 0.2),
        {"key": "x", "skipped": "no room"},
    ]
    assert summary(rows) == {"native_share": 0.86, "int4_share": 0.65, "int4_speedup_32k": 2.5}
    assert summary([]) == {"int4_speedup_32k": None}
    text = table({"device": "a card"}, rows, {"native_share": 0.86})
    assert "| native | 64 | 8192 | 16 | 50.0 | 0.9 |" in text
