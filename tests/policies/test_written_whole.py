"""What another process or a resumed run reads is there whole or as before, wherever its writing was cut off."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.quality.table import QualityTable, write_table
from envs.profile import read_profile, write_profile
from envs.simulated import DEFAULT_PROFILE
from policies.evaluation.cells import Setup
from policies.evaluation.scenarios import Span
from policies.evaluation.store import Store
from policies.train.recipe import Recipe, read_recipe, write_recipe


class Killed(BaseException):
    pass


def _profile(folder: Path, turn: int) -> object:
    write_profile(read_profile(DEFAULT_PROFILE).model_copy(update={"notes": [str(turn)]}), folder / "p.yaml")
    return read_profile(folder / "p.yaml")


def _recipe(folder: Path, turn: int) -> object:
    write_recipe(Recipe(steps=10, seed=turn), folder)
    return read_recipe(folder)


def _setup(folder: Path, _: int) -> object:
    setup = Setup(read_profile(DEFAULT_PROFILE), {}, Span(), 2.0)
    Store(folder, setup)
    return (folder / "setup.json").read_text()


def _cells(folder: Path, turn: int) -> object:
    """Half a line of a run that was killed, which is cut off."""
    if turn == 2:
        with (folder / "cells.jsonl").open("a") as file:
            file.write('{"key": "ha')
    _setup(folder, turn)
    return None


def _quality(folder: Path, turn: int) -> object:
    path = folder / "quality.json"
    write_table(QualityTable.model_construct(created=str(turn)), path)
    return path.read_text()


@pytest.mark.parametrize("write", [_profile, _recipe, _setup, _cells, _quality])
def test_a_writer_that_is_killed_leaves_what_was_there(
    write: Callable[[Path, int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fsync", _kill)
    with pytest.raises(Killed):
        write(tmp_path, 2)
    monkeypatch.undo()
    after = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    assert after.pop("cells.jsonl", b"").removesuffix(b'{"key": "ha') == b""
    assert after == before
    write(tmp_path, 3)


def _kill(_: int) -> None:
    raise Killed
