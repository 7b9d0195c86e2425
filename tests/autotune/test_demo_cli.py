"""``autotune run``: wrong usage is one line; with the real engine and model, format and block size move (slow)."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from autotune import together
from autotune.cli import app
from autotune.cli._shared import fail_with
from autotune.demo.bundled import bundled_model
from engine.clock import RealClock
from engine.serve import options_from, parser

MODEL = str(bundled_model())


@pytest.mark.parametrize(
    ("code", "words", "arguments"),
    [
        (2, "--workload 'nothing' is not built in; choose one of chat-steady", ["--workload", "nothing"]),
        (1, "model folder /nowhere does not exist", ["--demo", "--model", "/nowhere"]),
        (2, "--pairs", ["--pairs", "0"]),
        (2, "default: is compared with itself", ["--against", "default"]),
        (2, "write static:KNOB=VALUE", ["--against", "static:int4"]),
        (2, "predictor: it calculates with the engine's profile", ["--policy", "predictor"]),
        (2, "/nowhere", ["--profile", "/nowhere"]),
        (2, "--profile: only with --demo", ["--model", MODEL, "--profile", "p.yaml"]),
        (2, "--duration", ["--duration", "inf"]),
        (2, "/nowhere: no such rules file, nor a policy; known: none, static:", ["--rules", "/nowhere"]),
        (2, "/: Is a directory", ["--against", "/"]),
        (2, "--seed", ["--seed", "-1"]),
        (2, "--port: only with --model and without --demo", ["--port", "9"]),
        (2, "--record: only with --model and without --demo", ["--record", "r.csv"]),
        (2, "--run-dir: only with --demo", ["--model", MODEL, "--run-dir", "d"]),
        (2, "unrecognized arguments: --nosuch 3", ["--model", MODEL, "--nosuch", "3"]),
        (2, "/nowhere does not exist", ["--model", "/nowhere"]),
        (2, "native, int8, k8v4, int4", ["--model", MODEL, "--set", "kv_format=int3"]),
        (2, "unknown tunable 'page'", ["--model", MODEL, "--set", "page=1"]),
        (2, "--protect-layers -1: give at least 0", ["--model", MODEL, "--protect-layers", "-1"]),
        (2, "--host-pool-bytes", ["--model", MODEL, "--host-pool-bytes", "8X"]),
        (2, "/nowhere.json: the quality table cannot be read", ["--model", MODEL, "--quality-table", "/nowhere.json"]),
        (1, "/nowhere.yaml: No such file", ["--model", MODEL, "--config", "/nowhere.yaml"]),
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
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "does not exist" in line


def test_an_engine_that_cannot_start_says_why_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_bytes((Path(MODEL) / name).read_bytes())
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    command = [sys.executable, "-c", "from autotune.cli import main; main()", "run", "--model", str(tmp_path / "model")]
    command += ["--port", "0", "--control", str(tmp_path / "engine.sock"), "--config", str(tmp_path / "daemon.yaml")]
    (tmp_path / "daemon.yaml").write_text(f"admin: {{port: 0}}\njournal: {{path: {tmp_path / 'journal.db'}}}\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    # Off a terminal both log in JSON; what the supervisor says, and errors of a command line, are for people anyway.
    # On a busy machine it also says, every 15 s, that it is still loading.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{") and not line.endswith(" s so far")]
    assert lines[0].startswith("starting engine and daemon")
    assert "truncated or not a safetensors file" in lines[1]
    assert lines[2:] == ["error: engine exited with code 1 at start"]


def test_the_engine_gets_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[list[str], list[str], Path]] = []

    def keep(engine: list[str], daemon: list[str], control: Path, *_: object) -> int:
        started.append((engine, daemon, control))
        return 0

    monkeypatch.setattr(together, "run_together", keep)
    (tmp_path / "daemon.yaml").write_text("mode: advise\n")
    own = ["--port", "0", "--host-pool-bytes", "8M", "--protect-layers", "1", "--set", "kv_format=int8"]
    passed_on = ["--set", "block_size=64", "--max-model-len", "512", "--record", "r.csv"]
    both = ["--control", "/tmp/c.sock"]
    command = ["run", "--model", MODEL, *own, *passed_on, *both, "--config", str(tmp_path / "daemon.yaml")]
    assert fail_with(lambda: app(command, standalone_mode=False)) == 0
    ((engine, daemon, control),) = started
    options = options_from(parser().parse_args(engine))
    assert (options.model, options.port, options.host_pool_bytes) == (Path(MODEL), 0, 8 << 20)
    assert (options.protect_layers, options.max_model_len, options.record) == (1, 512, Path("r.csv"))
    assert options.tunables == {"kv_format": "int8", "block_size": "64"}
    assert options.control_path == control == Path("/tmp/c.sock")
    assert daemon == [*both, "--config", str(tmp_path / "daemon.yaml")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGTERM, 0)], ids=str)
def test_exit_codes_of_signals_are_the_shells_but_for_a_service_managers(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    class Signalled:
        def __init__(self, *_: object, **__: object) -> None: ...

        def start(self) -> None: ...

        def wait_ready(self, _limit_s: float, _advice: str) -> None: ...

        def wait(self) -> None:
            os.kill(os.getpid(), number)

        def request_stop(self) -> None: ...

        def stop(self) -> None: ...

    monkeypatch.setattr(together, "Supervisor", Signalled)
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        console = Console(file=io.StringIO())
        assert together.run_together([], [], Path("/nowhere"), RealClock(), console) == code
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


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
    for knob in ("formats_used", "block_sizes_used"):
        assert len(document[knob]) > 1, document
    assert document["evictions_used"] == ["none"]
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
