"""The demonstration with the real daemon and a stand-in for the engine: decisions, interrupts, no orphans."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.config import parse_config
from autotune.decisions import DecisionRecord
from autotune.demo.report import Arm, result
from autotune.demo.sides import DEFAULT_SIDES, sides
from autotune.demo.sizing import Memory, Rates, SizedLoad, size
from autotune.demo.stack import Stack, daemon_config, new_stack
from autotune.demo.watch import Seen
from autotune.replay.summary import Targets, summarise

# Speaks both of the engine's interfaces. Tokens come at once; the KV pool reports itself as full while "native".
ENGINE = """
import argparse, asyncio, json, os, signal, sys, time
from engine.stats import EngineStats, ResidentBytes
from engine.tunables import default_values, parse_change

parser = argparse.ArgumentParser()
parser.add_argument("verb")
for name in ("model", "host", "port", "control", "device", "dtype", "kv-pool-bytes", "max-waiting"):
    parser.add_argument("--" + name)
options = parser.parse_args()
values, revision, writers, seen = default_values(), 1, {}, {"offered": 0, "tokens": 0}


def stats():
    now = EngineStats("fake", "m", time.monotonic_ns(), 4096, 64, revision, dict(values))
    counters, gauges = now.counters, now.gauges
    counters.requests_offered = counters.requests_admitted = counters.requests_completed = seen["offered"]
    counters.generation_tokens, counters.steps = seen["tokens"], seen["offered"]
    gauges.kv_pool_bytes, gauges.running, gauges.waiting = 3_000_000, 8, 3
    gauges.kv_usage = 0.97 if values["kv_format"] == "native" else 0.6
    gauges.kv_used_bytes = int(gauges.kv_usage * gauges.kv_pool_bytes)
    gauges.resident_tokens = gauges.kv_used_bytes // 3072
    gauges.resident = [ResidentBytes(values["kv_format"], values["block_size"], gauges.kv_used_bytes, 900)]
    return now.to_json()


def view():
    progress = {"resident": [], "converged_fraction": 1.0, "held_below_format_bytes": 0}
    return {"instance": "fake", "revision": revision, "desired": values, "effective": values, "writers": writers,
            "progress": progress}


def patch(body):
    global revision
    revision += 1
    results = {}
    for knob, value in body["changes"].items():
        values[knob] = parse_change(knob, value)
        stamp = time.monotonic_ns()
        writers[knob] = {"writer": body["writer"], "reason": body["reason"], "revision": revision, "stamp_ns": stamp}
        results[knob] = {"status": "applied", "why": ""}
    return {"revision": revision, "results": results}


def answer(writer, document, status=200):
    data = json.dumps(document).encode()
    writer.write(f"HTTP/1.1 {status} X\\r\\nContent-Type: application/json\\r\\n".encode())
    writer.write(f"Content-Length: {len(data)}\\r\\n\\r\\n".encode() + data)


async def serve(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode()
            method, path, _ = head.split("\\r\\n")[0].split(" ")
            length = [line.split(":")[1] for line in head.lower().split("\\r\\n") if line.startswith("content-length")]
            body = json.loads(await reader.readexactly(int(length[0]))) if length and int(length[0]) else {}
            if path == "/v1/tunables":
                answer(writer, patch(body) if method == "PATCH" else view())
            elif path == "/v1/stats":
                answer(writer, stats())
            elif path == "/health":
                answer(writer, {})
            elif path == "/v1/models":
                answer(writer, {"data": [{"id": "m", "max_model_len": 4096, "vocab_size": 512}]})
            elif not body.get("stream"):
                answer(writer, {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 8}})
            else:
                seen["offered"] += 1
                writer.write(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n")
                lines = [{"choices": [{"token_ids": [1], "text": "w", "finish_reason": None}]}] * body["max_tokens"]
                lines.append({"choices": [{"token_ids": [], "text": "", "finish_reason": "length"}]})
                for line in [*map(json.dumps, lines), "[DONE]"]:
                    data = f"data: {line}\\n\\n".encode()
                    writer.write(f"{len(data):x}\\r\\n".encode() + data + b"\\r\\n")
                    await asyncio.sleep(0.001)  # what the probe measures
                seen["tokens"] += body["max_tokens"]
                writer.write(b"0\\r\\n\\r\\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sys.exit)
    await asyncio.start_server(serve, options.host, int(options.port))
    await asyncio.start_unix_server(serve, options.control)
    await asyncio.Event().wait()

asyncio.run(main())
"""
DEMO = """
import sys
from pathlib import Path
from rich.console import Console
from autotune.demo.options import DemoError, DemoOptions
from autotune.demo.run import run_demo
from engine.clock import RealClock
folder = Path(sys.argv[1])
options = DemoOptions(folder / "model", duration_s=float(sys.argv[2]), run_folder=folder / "run",
                      program=(sys.executable, str(folder / "stand_in.py")), settle_s=0.5)
try:
    sys.exit(run_demo(options, RealClock(), Console()))
except DemoError as error:
    sys.exit(f"error: {error}")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stand_in.py").write_text(ENGINE)
    (tmp_path / "model").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path


def start(folder: Path, duration_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DEMO, str(folder), str(duration_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_running(folder: Path) -> list[str]:
    """Command lines of processes that mention the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


def test_the_demonstration_ends_with_its_result(folder: Path) -> None:
    process = start(folder, 8)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    lines = output.splitlines()
    document = json.loads(lines[-1])
    assert document["requests_failed"] == 0
    assert document["requests_sent"] == document["requests_completed"] > 5
    assert document["formats_used"][0] == "native"
    assert len(document["formats_used"]) > 1
    assert document["decisions_applied"] >= 1
    for name in ("goodput_rps", "static_native_goodput_rps"):  # on a busy machine all may be too late for the targets
        (inside,) = document["sides"]["default" if name == "goodput_rps" else "none"]["inside"]
        assert (document[name] > 0) is (inside > 0), name
        assert 0 <= document[name] <= inside * document["requests_sent"], name
    assert "a native cache is full then" in output
    assert "kv_demand is the KV of all" in output
    assert any("static native" in line for line in lines)
    decided = [line for line in lines if "kv_format native ->" in line]
    assert decided
    assert all(re.match(r"  before the load: | +\d+\.\d s: ", line) for line in decided)
    for line in decided:  # what was wanted is told as well where the guard let less through
        move = re.search(r"kv_format native -> \w+", line)
        assert move is not None
        assert line.partition("; the guard: ")[0].count(move[0]) == 1, line
    assert left_running(folder) == []
    verdict, more, everything = lines[-4:-1]
    assert verdict.startswith(("the daemon with default ", "no difference: ", "neither "))
    assert "ratio_range" not in document["sides"]["default"]
    journal = folder / "run" / "2" / "journal.sqlite"
    assert more.startswith("more about a decision: autotune explain ")
    assert everything == f"all of them: autotune decisions --journal {journal}"
    told = autotune(more.partition(": ")[2])
    assert told.returncode == 0, told.stderr
    assert "wanted: " in told.stdout
    again = autotune(f"autotune replay-decisions --journal {journal}")
    assert again.returncode == 0, again.stdout
    assert " 0 differ" in again.stdout


def autotune(line: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(line)[1:]
    command = [sys.executable, "-c", "from autotune.cli import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("moment", "number"),
    [("1. Measuring", signal.SIGINT), ("daemon on", signal.SIGINT), ("daemon on", signal.SIGTERM)],
)
def test_an_interrupt_stops_everything(folder: Path, moment: str, number: signal.Signals) -> None:
    process = start(folder, 60)
    assert process.stdout is not None
    for line in process.stdout:
        if moment in line:
            break
    process.send_signal(number)
    process.communicate(timeout=60)  # the load alone would take as long
    assert process.returncode == 128 + number
    assert left_running(folder) == []


def test_an_engine_that_cannot_start_is_one_line(folder: Path) -> None:
    (folder / "stand_in.py").write_text("raise SystemExit('engine: the weights are torn')")
    process = start(folder, 5)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "engine: the weights are torn" in output.splitlines()[-1]
    assert output.splitlines()[-1].startswith("error: ")


def test_a_folder_without_a_model_is_one_line(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    process = start(folder, 5)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "holds no config.json" in output.splitlines()[-1]


def test_the_daemon_understands_its_configuration(tmp_path: Path) -> None:
    import yaml

    config = daemon_config(Stack(tmp_path, 1, 2), ttft_target_s=0.5, tbt_target_s=0.05, policy={"rules": "default"})
    parsed = parse_config(yaml.safe_dump(config))
    assert (parsed.targets.ttft_s, parsed.admin.port, parsed.mode) == (0.5, 2, "active")


def test_a_run_folder_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long a path"):
        new_stack(tmp_path / ("x" * 90), tuned=True)


def decision(tick: int, knob: str, new: str | int, verdict: str = "applied") -> DecisionRecord:
    return DecisionRecord(tick, 0.0, knob, None, new, "s", "because", "daemon", verdict, "")


def test_the_result_lists_values_in_the_order_of_the_knob() -> None:
    load: SizedLoad = size(Rates(1e4, 0.01, 1e-4, 0.1, 0.01, 448), Memory(3072, 912, 80, 256, 8, 4096), 1.0, 100, 300)
    summary = summarise([], Targets())
    seen = Seen(
        decisions=[decision(1, "kv_format", "int4", "converging"), decision(2, "eviction", "window", "rejected")],
        values={"kv_format": ["native", "int8"], "block_size": [32, 16], "eviction": ["none"]},
    )
    document = result(
        [Arm(DEFAULT_SIDES[0], summary, seen), Arm(DEFAULT_SIDES[1], summary, Seen())],
        load,
        Rates(1e4, 0.01, 1e-4, 0.1, 0.01, 448),
        DEFAULT_SIDES,
    )
    assert document["formats_used"] == ["native", "int8", "int4"]
    assert document["block_sizes_used"] == [16, 32]
    assert document["evictions_used"] == ["none"]
    assert document["decisions_applied"] == 1
    assert document["ttft_p95_s"] is None
    json.dumps(document)


def test_figures_of_other_rules_are_not_called_static_native() -> None:
    load: SizedLoad = size(Rates(1e4, 0.01, 1e-4, 0.1, 0.01, 448), Memory(3072, 912, 80, 256, 8, 4096), 1.0, 100, 300)
    summary = summarise([], Targets())
    both = sides(("default", "literature"), None, None)
    arms = [Arm(one, summary, Seen()) for one in both]
    document = result(arms, load, Rates(1e4, 0.01, 1e-4, 0.1, 0.01, 448), both)
    assert document["against"] == "literature"
    assert "against_goodput_rps" in document
    assert not any(key.startswith("static_native") for key in document)
