"""What training reads: a run to go on with or to export, whoever made it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from reader import BYTES, JSON, LINES, Reader
from toy_runs import last, recipe, run

from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE
from policies.card import PolicyFileError
from policies.train.folder import BEST, METRICS, SCORES
from policies.train.lessons import LESSONS, read_lessons
from policies.train.publish import publish
from policies.train.recipe import Lookahead
from policies.train.sweep import SUMMARY, best_run, profile_of

_ORIGINAL: Final = "original"
_MADE: Final = recipe(steps=128, judge_every=1, lookahead=Lookahead(rounds=1, every=4, epochs=1))


def _run(name: str) -> Callable[[Path], Path]:
    """A run on a toy, trained for a moment; ``name``: the file of it that will be bad."""

    def make(folder: Path) -> Path:
        run(_MADE, folder / "run")
        shutil.copytree(folder / "run", folder / _ORIGINAL)
        return folder / "run" / name

    return make


def _export(path: Path) -> None:
    folder = next(parent for parent in path.parents if parent.name == "run")
    publish(folder, folder.parent / "policy", read_profile(DEFAULT_PROFILE), created="now")


def _go_on(path: Path) -> None:
    """The file is the same in the best and in the last checkpoint; the rest is as it was."""
    folder = next(parent for parent in path.parents if parent.name == "run")
    data, name = path.read_bytes(), path.name
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / _ORIGINAL, folder)
    places = [folder / BEST / name, folder / last(folder) / name] if path.parent.name == BEST else [path]
    for place in places:
        place.write_bytes(data)
    run(_MADE, folder, resume=True)


def _sweep(folder: Path) -> Path:
    (folder / SUMMARY).write_text('[{"label": "a", "score": 0.5}]')
    return folder / SUMMARY


def _recipe(path: Path) -> None:
    from policies.train.recipe import read_recipe

    made = read_recipe(path.parent)
    profile_of(made.model_copy(update={"profile": None, "profile_digest": None}))


READERS: Final = (
    Reader("recipe of a run", _run("recipe.json"), _recipe, (PolicyFileError,), JSON, examples=30),
    Reader("scores of a run", _run(SCORES), _export, (PolicyFileError,), JSON, examples=20),
    Reader("state of a run, exported", _run(f"{BEST}/state.json"), _export, (PolicyFileError,), JSON, examples=20),
    Reader("arrays of a run, exported", _run(f"{BEST}/arrays.npz"), _export, (PolicyFileError,), BYTES, examples=20),
    Reader("weights of a run, exported", _run(f"{BEST}/model.zip"), _export, (PolicyFileError,), BYTES, examples=20),
    Reader("state of a run, resumed", _run(f"{BEST}/state.json"), _go_on, (PolicyFileError,), JSON, examples=10),
    Reader("arrays of a run, resumed", _run(f"{BEST}/arrays.npz"), _go_on, (PolicyFileError,), BYTES, examples=10),
    Reader("metrics of a run", _run(METRICS), _go_on, (PolicyFileError,), LINES, examples=10),
    Reader(
        "lessons of a run",
        _run(f"{LESSONS}/000000.npz"),
        lambda path: read_lessons(path.parent.parent, 1),
        (PolicyFileError,),
        BYTES,
        examples=20,
    ),
    Reader("runs of a sweep", _sweep, lambda path: best_run(path.parent), (ValueError,), JSON),
)
