"""``autotune run``: wrong usage is one line; with the real engine and model, all three knobs move (slow)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import app
from autotune.cli._shared import fail_with


@pytest.mark.parametrize(
    ("code", "words", "arguments"),
    [
        (2, "--workload 'nothing' is not built in; choose one of chat-steady", ["--workload", "nothing"]),
        (1, "/nowhere is not a model folder", ["--demo", "--model", "/nowhere"]),
        (2, "--pairs", ["--pairs", "0"]),
        (2, "--seed", ["--seed", "-1"]),
    ],
)
def test_wrong_usage_is_one_line(
    code: int, words: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail_with(lambda: app(["run", *arguments], standalone_mode=False)) == code
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert words in errors[0]


def test_a_model_that_cannot_be_served_is_one_line_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from autotune.cli import main; main()", "run", "--model", str(tmp_path / "none")]
    command += ["--port", "0", "--control", str(tmp_path / "engine.sock")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "does not exist" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_demonstration_moves_every_knob() -> None:
    command = [sys.executable, "-m", "autotune.demo"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1700, check=False)
    assert done.returncode == 0
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["requests_failed"] == 0
    assert document["requests_sent"] == document["requests_completed"] > 0
    assert document["decisions_applied"] >= 3
    for knob in ("formats_used", "block_sizes_used", "evictions_used"):
        assert len(document[knob]) > 1, document
    assert document["goodput_rps"] > document["static_native_goodput_rps"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_demonstration_can_be_interrupted() -> None:
    process = subprocess.Popen([sys.executable, "-m", "autotune.demo"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("3. Replay"):
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
