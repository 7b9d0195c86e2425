"""Several runs: seeds times settings, each in a folder of its own, and which of them came out best."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.clock import RealClock
from engine.errors import EngineError
from engine.json_text import load_json
from engine.whole_file import write_whole
from envs.profile import Profile, ProfileError, read_profile
from envs.simulated import DEFAULT_PROFILE
from policies.executors import Executor, in_order
from policies.train.checkpoint import Progress
from policies.train.recipe import Recipe, Source, checked
from policies.train.session import train
from policies.train.teacher import Teacher, teacher_for
from policies.train.traffic import RESOLVED_BY, resolve
from policies.train.vector import training_envs

SUMMARY = "runs.json"


@dataclass(frozen=True)
class Job:
    """One run: ``label`` is the name of its folder inside the sweep's ("" for the folder itself)."""

    label: str
    recipe: Recipe
    folder: str
    resume: bool = False


@dataclass(frozen=True)
class Outcome:
    """``score``: the best held-out one."""

    label: str
    folder: str
    score: float | None
    steps: int
    stopped: str
    scores: list[dict[str, Any]]


def jobs_of(recipe: Recipe, folder: Path, seeds: Sequence[int], settings: Sequence[str]) -> list[Job]:
    """Every seed with every combination of ``settings``, each ``KEY=VALUE,VALUE`` with KEY a dotted place in the recipe
    such as ``ppo.learning_rate``. Raises ValueError, one line.
    """
    axes = [[(key, value) for value in _values(text)] for text in settings if (key := text.partition("=")[0].strip())]
    if len(axes) != len(settings):
        raise ValueError(f"--sweep: write KEY=VALUE,VALUE, got {settings[0]!r}")
    jobs: list[Job] = []
    for chosen in itertools.product(*axes):
        for seed in seeds:
            data = recipe.model_dump(mode="json")
            data["seed"] = seed
            for key, value in chosen:
                _put(data, key, value)
            label = "_".join([f"seed-{seed}", *(f"{key}-{value}" for key, value in chosen)]).replace("/", "-")
            try:
                one = checked(Recipe.model_validate(data))
            except ValidationError as error:
                first = error.errors()[0]
                raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
            if any(job.label == label for job in jobs):
                raise ValueError(f"--sweep: {label} would be run twice; give every value once")
            jobs.append(Job(label, one, str(folder / label)))
    return jobs


def resolved(recipe: Recipe, known: dict[str, list[Source]] | None = None) -> Recipe:
    """With rates and targets that fit its profile, pool and lengths, and the profile's digest.

    ``known`` keeps what was found for recipes that agree in all of RESOLVED_BY: measuring takes seconds a source.
    Raises ProfileError, RuleError, TraceError, ValueError.
    """
    profile = profile_of(recipe)
    teacher_of(recipe, profile)
    known = {} if known is None else known
    key = recipe.model_dump_json(include=set(RESOLVED_BY))
    if key not in known:
        known[key] = resolve(recipe, profile)
    return recipe.model_copy(update={"sources": known[key], "profile_digest": profile.digest})


def resolved_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Each with rates and targets of its own settings: pool and lengths decide what an engine can serve.

    Raises ValueError, one line with the run's name, for settings that nothing can be played with.
    """
    known: dict[str, list[Source]] = {}
    found: list[Job] = []
    for job in jobs:
        try:
            found.append(replace(job, recipe=resolved(job.recipe, known)))
        except (EngineError, ValueError) as error:
            raise ValueError(f"{job.label}: {error}") from error
    return found


def run(job: Job, tell: Callable[[Progress, str], None] | None = None) -> Outcome:
    """One run from beginning to end, in this process. Raises what :func:`policies.train.session.train` does."""
    last = Progress()

    def note(progress: Progress, text: str) -> None:
        nonlocal last
        last = progress
        if tell is not None:
            tell(progress, text)

    profile, recipe = profile_of(job.recipe), job.recipe
    scores = train(
        recipe, Path(job.folder), training_envs(recipe, profile), teacher=teacher_of(recipe, profile),
        clock=RealClock(), tell=note, resume=job.resume,
    )  # fmt: skip
    return Outcome(job.label, job.folder, last.best, last.best_steps, last.stopped, [s.model_dump() for s in scores])


def run_all(jobs: Sequence[Job], executor: Executor, folder: Path) -> list[Outcome]:
    """Every job, the best first; a summary is left in ``folder``."""
    found = in_order(executor, run, jobs)
    found.sort(key=lambda outcome: -(outcome.score if outcome.score is not None else float("-inf")))
    folder.mkdir(parents=True, exist_ok=True)
    document = [vars(outcome) for outcome in found]
    write_whole(folder / SUMMARY, json.dumps(document, indent=1) + "\n")
    return found


def best_run(folder: Path) -> Path:
    """The run that a folder stands for: itself, or the best of a sweep. Raises OSError, ValueError."""
    summary = folder / SUMMARY
    if not summary.is_file():
        return folder
    if summary.stat().st_size > 1 << 20:
        raise ValueError(f"{summary}: larger than a summary can be")
    try:
        label = load_json(summary.read_bytes())[0]["label"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{summary}: no summary of runs") from error
    if not isinstance(label, str) or Path(label).name != label:
        raise ValueError(f"{summary}: {label!r:.80} is no run inside {folder}")
    return folder / label


def profile_of(recipe: Recipe) -> Profile:
    """Raises :class:`envs.profile.ProfileError`, also for another one than the run began with."""
    path = Path(recipe.profile) if recipe.profile else DEFAULT_PROFILE
    profile = read_profile(path)
    if recipe.profile_digest not in {None, profile.digest}:
        raise ProfileError(f"{path} is not the profile that this run began with")
    return profile


def teacher_of(recipe: Recipe, profile: Profile) -> Teacher:
    """Who a run begins from and is compared with. Raises RuleError, ValueError."""
    return teacher_for(None if recipe.warm_start is None else recipe.warm_start.teacher, profile)


def _values(text: str) -> list[str]:
    _, equals, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not found:
        raise ValueError(f"--sweep: write KEY=VALUE,VALUE, got {text!r}")
    return found


def _put(data: dict[str, Any], key: str, value: str) -> None:
    *path, last = key.split(".")
    place = data
    for part in path:
        inner = place.get(part)
        place = inner if isinstance(inner, dict) else {}
    if last not in place:
        raise ValueError(f"--sweep: the recipe has no {key}")
    try:
        place[last] = load_json(value)
    except ValueError:
        place[last] = value
