"""`kernels.gpu_smoke` where there is no GPU: one line, and an exit code of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import gpu_smoke


def test_without_a_cuda_device_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = tmp_path / "deep" / "smoke.json"
    assert gpu_smoke.main(["--out", str(target)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "no CUDA device" in printed.err
    assert not target.parent.exists()
