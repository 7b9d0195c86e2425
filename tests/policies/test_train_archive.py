"""Runs of unknown origin: what they carry besides numbers is never run, neither by resuming nor by exporting."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")
pytest.importorskip("torch", reason="the extra 'train' is not installed")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from test_train_session import last, recipe, run

from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE
from policies.card import PolicyFileError, read_policy
from policies.train.archive import read_states
from policies.train.folder import BEST, SCORES
from policies.train.publish import publish

PROFILE = read_profile(DEFAULT_PROFILE)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run(recipe(steps=128, judge_every=1), folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def poison(path: Path, entry: str, data: bytes) -> None:
    """Replace one entry of a zip."""
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    entries[entry] = data
    with zipfile.ZipFile(path, "w") as new:
        for name, content in entries.items():
            new.writestr(name, content)


def evil(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"policy": Payload(marker)}, buffer)
    return buffer.getvalue()


def test_a_run_is_exported_without_its_pickles(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    pickled = pickle.dumps(Payload(marker))
    poison(folder / BEST / "model.zip", "data", pickled)
    poison(folder / BEST / "model.zip", "pytorch_variables.pth", pickled)
    card = publish(folder, tmp_path / "policy", PROFILE, created="now")
    assert read_policy(tmp_path / "policy")[0] == card
    assert {score.policy for score in card.scores} == {"learned", "native", "right"}
    assert card.training.seed == 0
    assert not marker.exists()
    pickle.loads(pickled)
    assert marker.exists()  # the payload would have run


@pytest.mark.parametrize("entry", ["policy.pth", "policy.optimizer.pth"])
def test_code_in_place_of_weights_is_refused_and_not_run(entry: str, folder: Path, tmp_path: Path) -> None:
    """Case L.44: by export and by a resumed run alike."""
    marker = tmp_path / "ran"
    for data in (evil(marker), pickle.dumps(Payload(marker)), b"", b"PK\x03\x04", b"x" * 1000):
        for name in (BEST, last(folder)):
            poison(folder / name / "model.zip", entry, data)
        if entry == "policy.pth":
            with pytest.raises(PolicyFileError, match=r"policy\.pth"):
                publish(folder, tmp_path / "policy", PROFILE, created="now")
        with pytest.raises(PolicyFileError) as caught:
            run(recipe(steps=256, judge_every=1), folder, resume=True)
        assert "\n" not in str(caught.value)
    assert not marker.exists()
    assert not (tmp_path / "policy").exists()


def test_pickled_statistics_are_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    np.savez(folder / BEST / "arrays.npz", mean=np.array([Payload(marker)], dtype=object))
    with pytest.raises(PolicyFileError, match="no arrays of numbers"):
        publish(folder, tmp_path / "policy", PROFILE, created="now")
    (folder / BEST / "arrays.npz").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(PolicyFileError):
        publish(folder, tmp_path / "policy", PROFILE, created="now")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("recipe.json", b"{}"),
        ("recipe.json", b"\xff"),
        (SCORES, b"[]"),
        (SCORES, b'{"scores": [{"policy": 3}]}'),
        (f"{BEST}/state.json", b"[]"),
        (f"{BEST}/state.json", b'{"progress": {"episodes": 3}}'),
        (f"{BEST}/model.zip", b"no zip"),
    ],
)
def test_damaged_runs_are_refused_with_one_line(name: str, data: bytes, folder: Path, tmp_path: Path) -> None:
    (folder / name).write_bytes(data)
    with pytest.raises(PolicyFileError) as caught:
        publish(folder, tmp_path / "policy", PROFILE, created="now")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "policy").exists()


def test_other_networks_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run(recipe(steps=64, hidden=[8], judge_every=1), other)
    shutil.copy(other / BEST / "model.zip", folder / BEST / "model.zip")
    with pytest.raises(PolicyFileError, match=r"0\.weight is float32 \[8, 131\]"):
        publish(folder, tmp_path / "policy", PROFILE, created="now")


def test_a_run_that_has_not_ended_is_not_exported(folder: Path, tmp_path: Path) -> None:
    (folder / SCORES).unlink()
    with pytest.raises(PolicyFileError, match="has not ended"):
        publish(folder, tmp_path / "policy", PROFILE, created="now")


def test_entries_have_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.train.archive.MAX_ENTRY_BYTES", 100)
    with pytest.raises(PolicyFileError, match="larger than 100 bytes"):
        read_states(folder / BEST / "model.zip")
