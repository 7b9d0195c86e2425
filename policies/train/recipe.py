"""Everything that decides how a run goes, as JSON in its folder: what is resumed and exported is rebuilt from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.tunables import TUNABLES
from engine.whole_file import write_whole
from envs.randomise import Randomisation
from envs.reward import Objective
from envs.signals import Targets
from policies.advisor import PREDICTOR
from policies.card import MAX_WIDTH, PolicyFileError
from policies.guard import GuardConfig
from policies.rules import presets
from policies.usual_budget import USUAL_BUDGET

RECIPE_FILE = "recipe.json"
MAX_RECIPE_BYTES = 1 << 20
# Prefix policies and the host tier pay over longer times than an episode has.
USUAL_KNOBS = ("kv_format", "block_size", "eviction", "keep_tokens", "max_num_batched_tokens", "max_num_seqs")
# Of policies.split.TRAINING: what evaluation holds out is not learnt from. With the factors of prompts and outputs:
# public sources have few kinds of lengths, and a network knows its way among those that it has seen.
USUAL_WORKLOADS = (
    ("chat-bursty", 1.0, 1.0),
    ("code-bursty", 1.0, 1.0),
    ("diurnal", 1.0, 1.0),
    ("chat-bursty", 0.3, 4.0),
    ("chat-steady", 4.0, 1.0),
    ("code-gamma13", 1.0, 1.0),
    ("chat-turns", 1.0, 1.0),
)

_Positive = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(ge=1)]
_Share = Annotated[float, Field(ge=0, le=1)]
# In here nanoseconds are exact, and what is trained can be written into a card.
_Scale = Annotated[float, Field(ge=1e-6, le=1e6)]
_Seconds = Annotated[float, Field(ge=1e-3, le=86_400)]
_Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Source(_Strict):
    """Traffic: a workload of the catalogue by ``workload``, or a trace file by ``trace``.

    ``prompt_scale`` and ``output_scale`` multiply the lengths of a workload: public sources have few kinds of lengths.
    ``rate_scale`` multiplies its rate; None until :func:`policies.train.traffic.resolve` has measured what fits.
    Targets in seconds; None until the same has measured the unloaded engine. ``sha256``: of the requests of a trace.
    """

    workload: str | None = None
    trace: str | None = None
    prompt_scale: _Scale = 1.0
    output_scale: _Scale = 1.0
    rate_scale: Annotated[float, Field(gt=0, le=1e6)] | None = None
    ttft_target_s: _Positive | None = None
    tbt_target_s: _Positive | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        stretched = (self.prompt_scale, self.output_scale) != (1.0, 1.0)
        by = f":{self.prompt_scale:g}:{self.output_scale:g}" if stretched else ""
        return (self.workload or Path(self.trace or "").name) + by


def usual_sources() -> list[Source]:
    """What is trained on when nobody says: :data:`USUAL_WORKLOADS`."""
    return [
        Source(workload=name, prompt_scale=prompts, output_scale=outputs) for name, prompts, outputs in USUAL_WORKLOADS
    ]


class Ppo(_Strict):
    """Of ppo and maskable-ppo. A rollout is one whole episode of every environment."""

    learning_rate: _Positive = 3e-4
    batch_size: Annotated[int, Field(ge=2)] = 256
    epochs: _Count = 5
    gamma: _Share = 0.99
    gae_lambda: _Share = 0.95
    clip_range: _Positive = 0.2
    entropy: Annotated[float, Field(ge=0)] = 0.003
    target_kl: _Positive = 0.03


class Dqn(_Strict):
    """Of dqn; steps are those of all environments together."""

    learning_rate: _Positive = 3e-4
    batch_size: _Count = 128
    gamma: _Share = 0.99
    buffer_steps: _Count = 50_000
    first_steps: Annotated[int, Field(ge=0)] = 2048
    train_every: _Count = 4
    updates: _Count = 4
    target_every: _Count = 2000
    explore_share: _Share = 0.3
    explore_end: _Share = 0.02


class WarmStart(_Strict):
    """Imitation before reinforcement. ``teacher``: a preset, a rules file or ``predictor``. ``rounds``: in the first
    the teacher acts, later on the student does and the teacher says what it would have done. ``weight``: of a change
    against nothing, which is far more frequent.
    """

    teacher: str = "default"
    rounds: _Count = 2
    episodes: _Count = 1
    epochs: _Count = 20
    weight: _Positive = 2.0


class Lookahead(_Strict):
    """Learning by trying, between imitation and reinforcement (:mod:`policies.train.lookahead`).

    In each of ``rounds`` every environment plays an episode as the network would. At every ``every``-th decision the
    action that the network prefers and ``tries`` others are tried on copies of the engine, each left alone for
    as long as ``requests`` mean requests take alone one after another, though not for less than ``least`` decisions nor
    more than ``longest``, against doing nothing. With ``minutes`` there are as many rounds as fit into ``share`` of
    them. The network then learns what each action was worth beyond nothing, in ``unit`` shares of the horizon's usual
    load, at most ``most`` units, and less ``margin`` units: what is worth no more is better left. ``then``: what is
    done after the tried action, nothing or what the teacher advises; advice costs no margin, and to leave it does.
    ``sharpen`` divides its outputs before, and multiplies them after, so that preferences are small worths at first and
    reinforcement begins with few chance actions.
    """

    rounds: _Count = 4
    share: Annotated[float, Field(gt=0, le=1)] = 0.4
    every: _Count = 8
    tries: _Count = 5
    requests: _Positive = 2.0
    least: _Count = 4
    longest: _Count = 20
    epochs: _Count = 20
    batch_size: _Count = 128
    learning_rate: _Positive = 1e-3
    unit: _Positive = 0.05
    margin: Annotated[float, Field(ge=0)] = 0.2
    most: _Positive = 4.0
    then: Literal["nothing", "advice"] = "nothing"
    sharpen: _Positive = 20.0


class Recipe(_Strict):
    """A run. Durations in seconds; ``steps`` are control intervals over all environments, ``minutes`` an alternative
    end that depends on the machine. Targets that are None are each source's own, as evaluation fixes them
    (:mod:`policies.evaluation.calibration`); ``length_scale`` divides prompts and outputs.

    ``profile``: a path, None for the one of :class:`envs.simulated.SimulatedEngine`; its digest must stay what it was.
    ``quality_budget``: mean relative loss of a generated token that is allowed; ``price`` is what using the budget
    up costs at first, in shares of what all requests inside their targets earn, and moves by at most
    ``price_step`` per rollout until the loss of training is the budget.
    ``advised``: the network sees what the teacher would do and learns when to do something else; the exported policy
    takes the teacher along.
    ``group``: so many environments play the same traffic at the same time, and the reward of each is what it got beyond
    the mean of the others; 1 switches that off.
    """

    kind: Literal["kv-autotune run"] = "kv-autotune run"
    version: Literal[1] = 1
    algo: Literal["ppo", "maskable-ppo", "dqn"] = "maskable-ppo"
    sources: Annotated[list[Source], Field(min_length=1)] = usual_sources()
    profile: str | None = None
    profile_digest: str | None = None
    pool_bytes: _Count | None = None
    knobs: Annotated[list[str], Field(min_length=1)] = list(USUAL_KNOBS)
    objective: Objective = Objective.INTERACTIVE
    length_scale: _Scale = 1.0
    ttft_target_s: _Positive | None = None
    tbt_target_s: _Positive | None = None
    quality_budget: _Positive = USUAL_BUDGET
    price: Annotated[float, Field(ge=0)] = 0.1
    price_step: Annotated[float, Field(ge=0)] = 0.02
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: _Count | None = None
    minutes: _Positive | None = None
    envs: Annotated[int, Field(ge=1, le=1024)] = 8
    processes: bool = True
    group: _Count = 4
    interval_s: _Seconds = 2.0
    episode_steps: Annotated[int, Field(ge=4, le=100_000)] = 128
    warm_up_s: _Seconds = 10.0
    short_s: _Seconds = 10.0
    long_s: _Seconds = 60.0
    randomise: bool = True
    hidden: Annotated[list[_Width], Field(max_length=4)] = [64, 64]
    warm_start: WarmStart | None = WarmStart()
    advised: bool = False
    lookahead: Lookahead | None = None
    ppo: Ppo = Ppo()
    dqn: Dqn = Dqn()
    judge_every: _Count = 8
    judge_episodes: _Count = 16
    patience: _Count = 8

    @property
    def episode_s(self) -> float:
        return self.episode_steps * self.interval_s

    def targets_of(self, source: Source) -> Targets:
        """Those that :class:`envs.signals.Targets` has by default where neither source nor recipe has any."""
        usual = Targets()
        return Targets(
            source.ttft_target_s or self.ttft_target_s or usual.ttft_s,
            source.tbt_target_s or self.tbt_target_s or usual.tbt_s,
        )

    def guard_config(self) -> GuardConfig:
        """The daemon's own guard, in which only ``knobs`` may move."""
        return GuardConfig(window_s=self.short_s, allowed={name: () for name in TUNABLES if name not in self.knobs})

    def randomisation(self) -> Randomisation:
        return Randomisation.usual() if self.randomise else Randomisation()


def checked(recipe: Recipe) -> Recipe:
    """The recipe if it hangs together. Raises ValueError, one line."""
    for knob in recipe.knobs:
        if knob not in TUNABLES:
            raise ValueError(f"--knobs: no tunable {knob!r}; known: {', '.join(TUNABLES)}")
    if recipe.envs % recipe.group:
        raise ValueError(f"--envs must be a multiple of --group, got {recipe.envs} and {recipe.group}")
    if (recipe.steps is None) == (recipe.minutes is None):
        raise ValueError("give either --steps or --minutes")
    if recipe.algo == "dqn" and (recipe.steps is None or recipe.group > 1):
        raise ValueError(
            "dqn needs --steps (its exploration follows them) and --group 1 (it learns from old experience)"
        )
    if recipe.algo == "dqn" and recipe.lookahead is not None:
        raise ValueError("looking ahead teaches a network whose outputs are preferences: take ppo or maskable-ppo")
    if recipe.advised and (recipe.warm_start is None or recipe.algo == "dqn" or not recipe.hidden):
        raise ValueError("an advised network needs a teacher, hidden layers, and ppo or maskable-ppo")
    if recipe.advised and recipe.warm_start is not None:
        teacher, known = recipe.warm_start.teacher, (*presets(), PREDICTOR)
        if teacher not in known:  # a card names no file: the exported policy would not find it
            raise ValueError(
                f"an advised network takes its teacher along by name: one of {', '.join(known)}, not {teacher!r:.80}"
            )
    if recipe.lookahead is not None and recipe.lookahead.then == "advice" and not recipe.advised:
        raise ValueError("lookahead: only an advised network has advice to follow after what is tried")
    if any(s.trace is not None and (s.prompt_scale, s.output_scale) != (1.0, 1.0) for s in recipe.sources):
        raise ValueError("the lengths of a trace are what they are: only workloads are stretched")
    if not recipe.short_s <= recipe.long_s:
        raise ValueError(f"windows need short <= long, got {recipe.short_s:g} and {recipe.long_s:g}")
    return recipe


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Raises OSError."""
    text = json.dumps(recipe.model_dump(mode="json"), indent=1) + "\n"
    write_whole(folder / RECIPE_FILE, text)


def read_recipe(folder: Path) -> Recipe:
    """Raises PolicyFileError for a folder that holds no run."""
    path = folder / RECIPE_FILE
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise PolicyFileError(f"{folder} is no training run: {path.name}: {error.strerror}") from error
    if len(data) > MAX_RECIPE_BYTES:
        raise PolicyFileError(f"{path}: larger than a recipe can be")
    try:
        return checked(Recipe.model_validate_json(data))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise PolicyFileError(f"{path} is no recipe of this version: {place or 'file'}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise PolicyFileError(f"{path}: {error}") from error
