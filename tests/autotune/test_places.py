"""No command writes two things into one file, nor into one that it reads; it says so before anything takes time. And
``-`` is standard output, or refused, but never a file of that name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from autotune.cli import app
from autotune.cli._places import check_places, write_parts
from autotune.cli._shared import CliError, given_path, new_path
from engine.arguments import parser


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "chat-steady", "--html", "X", "--json", "X"],
        ["simulate", "chat-steady", "--html", "X", "--json", "sub/../X"],
        ["simulate", "X", "--json", "X"],
        ["simulate", "chat-steady", "--compare", "X", "--html", "X"],
        ["simulate", "chat-steady", "--profile", "X", "--json", "X"],
        ["simulate", "chat-steady", "--policy", "X", "--json", "X"],
        ["simulate", "chat-steady", "--policy", "unbudgeted:X", "--json", "X"],
        ["simulate", "chat-steady", "--compare", "learned:policy", "--html", "policy/card.json"],
        ["tune-rules", "out/tuned.yaml", "-o", "out"],
        ["explain-rules", "--plot", "X", "--json", "X"],
        ["explain-rules", "X", "--plot", "X"],
        ["replay", "chat-steady", "--json", "X", "--records", "X"],
        ["replay", "X", "--records", "X"],
        ["profile", "X", "--analytic", "L4", "-o", "X"],
        ["profile", "model", "--quality", "X", "-o", "link"],
    ],
)
def test_one_file_is_not_two_things(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "X").write_text("mine")
    (tmp_path / "link").symlink_to("X")
    for link in ("policy/card.json", "out/tuned.yaml"):
        (tmp_path / link).parent.mkdir()
        (tmp_path / link).symlink_to(tmp_path / "X")
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, CliError)
    assert error.code == 2
    assert "name another file" in str(error)
    assert "\n" not in str(error)
    assert (tmp_path / "X").read_text() == "mine"


def test_different_files_stdout_and_devices_may_be_written(tmp_path: Path) -> None:
    check_places({"--html": tmp_path / "a", "--json": tmp_path / "b"}, {"TRACE": "chat-steady", "--profile": None})
    check_places({"--html": Path("-"), "--json": tmp_path / "b"})
    check_places({"--html": Path(os.devnull), "--json": Path(os.devnull)})
    with pytest.raises(CliError, match="cannot be written"):
        check_places({"--json": tmp_path})
    with pytest.raises(CliError, match="is written to by --html as well"):
        check_places({"--html": tmp_path / "a", "--json": tmp_path / "a"})


SHORT = ["simulate", "chat-steady", "--duration", "20", "--policy", "none"]
LEVELS = ["explain-rules", "--loads", "0.5", "--hold", "5"]


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        ([*SHORT, "--html", "-"], "<!doctype html>"),
        ([*SHORT, "--json", "-"], '{"workload": "chat-steady"'),
        ([*LEVELS, "--plot", "-"], "<!doctype html>"),
        ([*LEVELS, "--json", "-"], '[{"direction": "up", "load": 0.5'),
    ],
)
def test_standard_output_gets_the_document_and_nothing_else(
    arguments: list[str], begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(begins)
    if begins.startswith("<"):
        assert result.stdout.endswith("</html>\n")
    else:
        json.loads(result.stdout)
    assert "targets: " in result.stderr  # what is for people goes there
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"/none/x: cannot be written: No such file or directory$"):
        write_parts(tmp_path / "none" / "x", ["text"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "chat-steady", "--html", "-", "--json", "-"],
        ["explain-rules", "--plot", "-", "--json", "-"],
        ["replay", "chat-steady", "--json", "-", "--records", "-"],
    ],
)
def test_standard_output_is_not_two_things(arguments: list[str]) -> None:
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, CliError)
    assert error.code == 2
    assert "cannot both go to standard output" in str(error)


@pytest.mark.parametrize(
    "arguments",
    [
        ["trace", "generate", "chat-steady", "--duration", "10", "-o"],
        ["trace", "import", "X", "-o"],
        ["trace", "inspect", "chat-steady", "--plot"],
        ["export", "run", "-o"],
        ["evaluate", "-o"],
        ["tune-rules", "-o"],
        ["train", "-o"],
        ["compare-formats", "model", "-o"],
        ["profile", "model", "--analytic", "L4", "-o"],
        ["record-proxy", "--target", "http://127.0.0.1:9", "--record"],
        ["run", "--run-dir"],
    ],
)
def test_what_cannot_go_to_standard_output_says_so(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*arguments, "-"])
    assert result.exit_code == 2
    assert "cannot go to standard output" in result.output.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_the_engine_records_into_no_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--model", "model", "--record", "-"])
    assert "cannot go to standard output" in capsys.readouterr().err


def test_a_file_of_that_name_can_still_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(given_path("-")) == "-"
    assert given_path("./-") == new_path("./-") == tmp_path / "-"
    with pytest.raises(typer.BadParameter, match="the path is empty"):
        new_path("")
