"""From a run to an exported policy: weights out of its best checkpoint, everything else out of its own JSON."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Final, cast

from pydantic import ValidationError

from engine.json_text import load_json
from engine.text import one_line
from envs import SIMULATED_ENGINE_ID
from envs.profile import Profile
from policies.card import Card, GuardLimits, PolicyFileError, ProfileOf, Score, Spaces, Traffic, Training
from policies.export import export_policy
from policies.train import checkpoint
from policies.train.algorithms import network_of
from policies.train.archive import POLICY, actor_tensors, read_states
from policies.train.folder import BEST, SCORES
from policies.train.recipe import Recipe, read_recipe

MAX_SCORES_BYTES: Final = 1 << 20
_PARTS: Final = ("numpy", "gymnasium", "torch", "stable_baselines3", "sb3_contrib")


def publish(run: Path, folder: Path, profile: Profile, *, created: str) -> Card:
    """Export the best model of a run. ``profile``: the one of its recipe. Raises PolicyFileError, OSError.

    The run's zip is opened for tensors alone; a run of unknown origin can be exported without running code of it.
    """
    recipe = read_recipe(run)
    states = read_states(run / BEST / checkpoint.MODEL)
    normaliser, seen, progress = checkpoint.statistics_of(run / BEST)
    tensors, spaces = actor_tensors(recipe.algo, states[POLICY]), Spaces.current(advised=recipe.advised)
    card = Card(
        name=re.sub(r"[^A-Za-z0-9._+ -]", "-", f"{recipe.algo}-{run.resolve().name}")[:80],
        created=created,
        algorithm=recipe.algo,
        environment=SIMULATED_ENGINE_ID,
        spaces=spaces,
        interval_s=recipe.interval_s,
        short_s=recipe.short_s,
        long_s=recipe.long_s,
        objective=recipe.objective.value,
        ttft_target_s=median(recipe.targets_of(source).ttft_s for source in recipe.sources),
        tbt_target_s=median(recipe.targets_of(source).tbt_s for source in recipe.sources),
        guard=GuardLimits.of(recipe.guard_config()),
        network=network_of(recipe, len(spaces.observation), spaces.actions),
        normaliser=normaliser,
        ranges=seen.ranges(),
        training=_training(recipe, progress.best_steps),
        scores=_scores(run / SCORES),
        profile=ProfileOf(digest=profile.digest, description=profile.describe(), estimated=profile.is_estimated),
        sha256="0" * 64,  # the export fills it in
        advisor=recipe.warm_start.teacher if recipe.advised and recipe.warm_start is not None else None,
        versions={"python": sys.version.split()[0], **{part: version(part) for part in _PARTS}},
    )
    return export_policy(folder, card, tensors)


def _training(recipe: Recipe, steps: int) -> Training:
    spread = recipe.randomisation()
    return Training(
        traffic=[Traffic(name=s.name, rate_scale=s.rate_scale or 1.0, sha256=s.sha256) for s in recipe.sources],
        seed=recipe.seed,
        steps=steps,
        episodes=steps // recipe.episode_steps,
        episode_s=recipe.episode_s,
        envs=recipe.envs,
        teacher=None if recipe.warm_start is None else recipe.warm_start.teacher,
        randomisation={name: cast("tuple[float, float]", limits) for name, limits in vars(spread).items()},
    )


def _scores(path: Path) -> list[Score]:
    try:
        with path.open("rb") as file:
            document = load_json(file.read(MAX_SCORES_BYTES))
        return [Score.model_validate(row) for row in document["scores"]]
    except FileNotFoundError:
        raise PolicyFileError(f"{path}: the run has not ended; go on with --resume") from None
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise PolicyFileError(f"{path}: no usable scores: {one_line(error, 200)}") from error
