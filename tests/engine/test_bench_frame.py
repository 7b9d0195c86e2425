"""The frame of the benchmarks' command lines: rows by name, wrong usage in one line, the document last."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import autotune.bench.__main__
import engine.bench.__main__
import engine.cache_bench.__main__
import envs.bench_sim
from engine.bench_frame import bench_parser, conclude, log


def test_all_rows_or_the_default_ones_or_those_that_are_named() -> None:
    rows = ["a", "b", "c"]
    assert bench_parser("here", None, rows).parse_args([]).rows == rows
    parser = bench_parser("here", None, rows, ["b"])
    assert parser.parse_args([]).rows == ["b"]
    given = parser.parse_args(["--rows", "c,a", "--quick", "--json", "out.json"])
    assert (given.rows, given.quick, given.json) == (["c", "a"], True, Path("out.json"))


@pytest.mark.parametrize(
    "main",
    [engine.bench.__main__.main, engine.cache_bench.__main__.main, envs.bench_sim.main, autotune.bench.__main__.main],
)
@pytest.mark.parametrize("wrong", ["nothing", "", ","])
def test_wrong_rows_are_one_line_that_names_the_right_ones(
    main: Callable[[list[str]], int], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_of:
        main(["--rows", wrong])
    assert exit_of.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: argument --rows: ")
    assert "choose from" in captured.err
    assert captured.err.count("\n") == 1


def test_the_document_is_the_last_line_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, document = tmp_path / "out.json", {"bench": "none", "figure": 1.5}
    log("on the way")
    conclude(document, path)
    assert capsys.readouterr().out == f"on the way\n{json.dumps(document)}\n"
    assert json.loads(path.read_text()) == document
