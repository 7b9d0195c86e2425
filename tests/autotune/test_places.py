"""No command writes two things into one file, nor into one that it reads; it says so before anything takes time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.cli._places import check_places
from autotune.cli._shared import CliError


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
    check_places({"--html": Path("-"), "--json": Path("-")})
    check_places({"--html": Path(os.devnull), "--json": Path(os.devnull)})
    with pytest.raises(CliError, match="cannot be written"):
        check_places({"--json": tmp_path})
    with pytest.raises(CliError, match="is written to by --html as well"):
        check_places({"--html": tmp_path / "a", "--json": tmp_path / "a"})
