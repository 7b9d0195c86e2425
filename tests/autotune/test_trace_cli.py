"""``autotune trace``: import, inspect, list, generate; wrong usage is one line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import app, replay, trace
from autotune.cli._shared import fail_with
from envs.workload.catalogue import CATALOGUE
from envs.workload.generators import stream
from envs.workload.loaders import load_trace
from envs.workload.scaling import Scaling

MOONCAKE = (
    '{"timestamp": 5000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}\n'
    '{"timestamp": 1000, "input_length": 512, "output_length": 4, "hash_ids": [1]}\n'
)


def run(*arguments: str | Path) -> int:
    return fail_with(lambda: app(["trace", *map(str, arguments)], standalone_mode=False))


def test_a_table_of_ones_own_becomes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "own.csv", tmp_path / "own.trace.csv.gz"
    table.write_text("ts,in,out,user\n2026-01-01 10:00:01,7,3,b\n2026-01-01 10:00:00,5,2,a\n")
    columns = "arrival=ts,prompt=in,output=out,source=user"
    assert run("import", table, "--columns", columns, "-o", out) == 0
    assert capsys.readouterr().out.splitlines() == [
        "note: 1 rows were out of order of arrival: sorted",
        f"{out}: 2 requests in 1 s",
    ]
    rows = [(r.arrival_s, r.prompt_tokens, r.output_tokens, r.source) for r in load_trace(out).requests]
    assert rows == [(0.0, 5, 2, "a"), (1.0, 7, 3, "b")]
    assert run("import", table, "--columns", columns, "-o", out) == 1
    assert "exists already" in capsys.readouterr().err
    assert run("import", table, "--columns", columns, "-o", out, "--force") == 0


def test_a_known_form_needs_no_columns(tmp_path: Path) -> None:
    source, out = tmp_path / "m.jsonl", tmp_path / "m.csv"
    source.write_text(MOONCAKE)
    assert run("import", source, "-o", out) == 0
    trace = load_trace(out)
    assert trace.block_tokens == 512
    assert [r.hash_ids for r in trace.requests] == [(1,), (1, 2)]


def test_inspect_tells_the_same_to_people_and_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(MOONCAKE)
    assert run("inspect", path, "--json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["requests"] == 2
    assert document["mean_rps"] == pytest.approx(0.25)
    assert document["hit_ratio"] == pytest.approx(512 / 1536)
    assert document["prompt"]["max"] == 1024
    assert run("inspect", path) == 0
    shown = capsys.readouterr().out
    assert "33.3% of prompt tokens" in shown
    assert "0.25 requests/s" in shown


def test_inspect_takes_built_in_workloads_and_windows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "flash-crowd", "--json", "--start", "240", "--duration", "60") == 0
    peak = json.loads(capsys.readouterr().out)
    assert run("inspect", "flash-crowd", "--json", "--duration", "200") == 0
    calm = json.loads(capsys.readouterr().out)
    assert peak["mean_rps"] > 4 * calm["mean_rps"]
    assert run("inspect", "chat-poisson", "--rate", "20", "--json") == 0
    assert json.loads(capsys.readouterr().out)["mean_rps"] == pytest.approx(20, rel=0.05)


def test_list_tells_what_each_workload_stresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    shown = capsys.readouterr().out
    assert all(workload.stresses in shown for workload in CATALOGUE.values())
    assert run("list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(CATALOGUE)


def test_generate_writes_what_the_stream_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.csv"
    assert run("generate", "chat-turns", "-o", out, "--duration", "120", "--rate", "6", "--seed", "3") == 0
    expected = list(stream(CATALOGUE["chat-turns"], duration_s=120, seed=3, rate_scale=2.0))
    loaded = load_trace(out)
    assert [r.hash_ids for r in loaded.requests] == [r.hash_ids for r in expected]
    assert loaded.block_tokens == 16
    assert f"{len(expected)} requests in 120 s, seed 3" in capsys.readouterr().out


def test_generate_follows_an_envelope_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    envelope, out = tmp_path / "e.csv", tmp_path / "t.csv"
    envelope.write_text("t_s,rps\n0,1\n100,20\n20,1\n300,1\n")  # 200, digitised carelessly
    assert run("generate", "chat-poisson", "--envelope", envelope, "-o", out, "--duration", "400") == 0
    assert "note: e.csv: 1 of 4 times had lost trailing zeros: repaired" in capsys.readouterr().out
    arrivals = [r.arrival_s for r in load_trace(out).requests]
    assert sum(95 <= at < 200 for at in arrivals) > 10 * sum(at < 95 for at in arrivals)


def test_replay_takes_a_start_and_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},{i + 1},1\n" for i in range(100)))
    cut = replay._load(str(path), Scaling(rate_rps=4.0), 60.0, skip_bad_lines=False)
    assert cut.requests[0].prompt_tokens == 61
    assert cut.duration_s == pytest.approx(39 / 4)
    # Pauses to think are generated at the rate, not stretched to it; thinning comes off the rate that was asked for.
    built_in = replay._load("chat-turns", Scaling(rate_rps=6.0, keep=0.5, duration_s=300.0), 0.0, skip_bad_lines=False)
    assert len(built_in.requests) / 300 == pytest.approx(6.0, rel=0.15)
    assert not any("arrival times multiplied" in note for note in built_in.notes)


@pytest.mark.parametrize(
    ("code", "words", "arguments"),
    [
        (2, "'nothing' is not built in; choose one of chat-steady", ["generate", "nothing", "-o", "x"]),
        (2, "--rate must be from 1e-06 to 1e+06", ["generate", "diurnal", "-o", "x", "--rate", "0"]),
        (2, "--rate must be from 1e-06 to 1e+06", ["generate", "diurnal", "-o", "x", "--rate", "1e300"]),
        (2, "--duration must be from", ["generate", "diurnal", "-o", "x", "--duration", "1e300"]),
        (1, "is no plain file", ["generate", "diurnal", "-o", "/", "--force"]),
        (1, "is no plain file", ["generate", "diurnal", "-o", "/dev/null", "--force"]),
        (2, "takes no --envelope", ["generate", "regime-shift", "-o", "x", "--envelope", "e"]),
        (1, "cannot be read", ["generate", "diurnal", "-o", "x", "--envelope", "/none"]),
        (1, "nothing arrives", ["generate", "diurnal", "-o", "x", "--duration", "0.0001"]),
        (2, "look at 604800 s of it at most", ["inspect", "diurnal", "--start", "inf"]),
        (2, "/none: no such file, nor a built-in workload", ["inspect", "/none"]),
        (1, "no request arrives", ["inspect", "diurnal", "--start", "3590", "--duration", "0.0001"]),
        (1, "/none: cannot be read", ["import", "/none", "-o", "x"]),
        (2, "expected ROLE=COLUMN, got 'ts'", ["import", "f", "-o", "x", "--columns", "ts"]),
        (2, "names arrival twice", ["import", "f", "-o", "x", "--columns", "arrival=a,arrival=b"]),
        (2, "which column holds the prompt tokens", ["import", "f", "-o", "x", "--columns", "arrival=a"]),
        (2, "no unit of time", ["import", "f", "-o", "x", "--columns", "prompt=p,output=o", "--unit", "h"]),
        (
            2,
            "blocks hold from 1 byte",
            ["import", "f", "-o", "x", "--columns", "prompt=p,output=o,hashes=h", "--block-tokens", "inf"],
        ),
    ],
)
def test_wrong_usage_is_one_line(
    code: int,
    words: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == code
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert words in errors[0]
    assert not list(tmp_path.iterdir())


def test_a_plot_without_matplotlib_is_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace.importlib.util, "find_spec", lambda _name: None)
    assert run("inspect", "diurnal", "--plot", tmp_path / "p.png") == 1
    assert "pip install 'kv-autotune[plots]'" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("name", ["code-gamma13", "chat-turns"])
def test_a_plot_is_drawn(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "p.png"
    assert run("inspect", name, "--plot", plot, "--duration", "300") == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    single = tmp_path / "one.csv"
    single.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    assert run("inspect", single, "--plot", plot) == 0
    assert run("inspect", name, "--plot", tmp_path / "p.nonsense") == 1
    assert "cannot be drawn" in capsys.readouterr().err
