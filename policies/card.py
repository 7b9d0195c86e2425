"""The card of an exported policy: what it was trained on, and everything that has to agree with what runs it. No torch.

A policy is a folder with two files and no code: ``card.json`` and ``weights.safetensors``. Reading one never unpickles,
and what does not fit this program is refused with one line that says what.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load

from engine.tunables import TUNABLES, CostClass, TunableValue
from envs import SIMULATED_ENGINE_ID
from envs.features import FEATURES
from envs.spaces import all_changes, vector_names
from policies.advice_input import ADVICE_ENTRIES, advised_names
from policies.guard import GuardConfig, RateLimit

CARD_FILE: Final = "card.json"
WEIGHTS_FILE: Final = "weights.safetensors"
MAX_CARD_BYTES: Final = 1 << 20
MAX_WEIGHTS_BYTES: Final = 16 << 20
MAX_LAYERS: Final = 8
MAX_WIDTH: Final = 4096
Tensors = dict[str, NDArray[np.float32]]

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e6)]
Name = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+ -]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=500)]


class PolicyFileError(ValueError):
    """A policy's file, or one about policies, that cannot be used here; one line."""


class Strict(BaseModel):
    """Nothing but what is declared, of exactly the declared types, and no number that is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Knob(Strict):
    """A tunable and its values, both in the order that actions count them."""

    name: Text
    values: list[int | str]


class Spaces(Strict):
    """``observation``: the name of every entry of the vector, with what an advisor would do behind it for a policy that
    has one. Action 0 is nothing, then come every knob's values.
    """

    observation: list[Text]
    actions: int
    tunables: list[Knob]

    @classmethod
    def current(cls, *, advised: bool = False) -> Self:
        """What this program has."""
        knobs = [Knob(name=knob.name, values=list(knob.values)) for knob in TUNABLES.values()]
        names = advised_names() if advised else vector_names()
        return cls(observation=list(names), actions=1 + len(all_changes()), tunables=knobs)

    def objection(self, *, advised: bool = False) -> str | None:
        """What differs from this program, in one line."""
        here = self.current(advised=advised)
        theirs, ours = [knob.name for knob in self.tunables], [knob.name for knob in here.tunables]
        if theirs != ours:
            return f"its tunables are {', '.join(theirs)[:200]}; here they are {', '.join(ours)}, in this order"
        for knob, ours_now in zip(self.tunables, here.tunables, strict=True):
            if knob.values != ours_now.values:
                return f"its values of {knob.name} are {knob.values!r:.100}; here they are {ours_now.values}"
        if self.actions != here.actions:
            return f"it has {self.actions} actions; here there are {here.actions}"
        if len(self.observation) != len(here.observation):
            return f"its observation has {len(self.observation)} entries; here it has {len(here.observation)}"
        for index, (name, other) in enumerate(zip(self.observation, here.observation, strict=True)):
            if name != other:
                return f"entry {index} of its observation is {name!r:.60}; here it is {other!r}"
        return None


class Network(Strict):
    """A multilayer perceptron. ``widths``: input, hidden, output. Tensors ``0.weight`` [out, in], ``0.bias`` and on.

    ``skip``: so many of the last inputs go past the hidden layers and join what these come to, behind it.
    """

    activation: Literal["tanh", "relu"]
    widths: Annotated[list[Annotated[int, Field(ge=1, le=MAX_WIDTH)]], Field(min_length=2, max_length=MAX_LAYERS + 1)]
    skip: Annotated[int, Field(ge=0, le=MAX_WIDTH)] = 0

    @model_validator(mode="after")
    def _has_hidden_layers(self) -> Self:
        if self.skip and (len(self.widths) < 3 or self.skip >= self.widths[0]):
            raise ValueError(f"{self.skip} inputs cannot go past layers {self.widths}")
        return self

    def shapes(self) -> list[tuple[int, ...]]:
        """Of every layer's weight: outputs, inputs."""
        inputs, last = list(self.widths[:-1]), len(self.widths) - 2
        inputs[0] -= self.skip
        inputs[last] += self.skip
        return list(zip(self.widths[1:], inputs, strict=True))


class Normaliser(Strict):
    """An entry becomes clip((x - mean) / sqrt(var + epsilon), -clip, clip), computed in float64."""

    mean: list[float]
    var: list[Annotated[float, Field(ge=0)]]
    epsilon: Positive
    clip: Positive


class Range(Strict):
    """Of one feature in training, encoded to 0..1; None if it was never known. ``unknown``: whether it ever was."""

    low: Share | None
    high: Share | None
    unknown: bool


class GuardLimits(Strict):
    """The guard that it was trained behind; seconds, by cost class. ``knobs``: those that it may move."""

    window_s: Annotated[float, Field(ge=0, le=86400)]
    dwell_s: dict[CostClass, Annotated[float, Field(ge=0, le=86400)]]
    rates: dict[CostClass, tuple[Annotated[int, Field(ge=0)], Positive]]
    retry_s: Annotated[float, Field(ge=0, le=86400)]
    knobs: list[Text]

    @classmethod
    def of(cls, config: GuardConfig) -> Self:
        """Raises ValueError for a guard that allows some values of a knob and not others, which no card can say."""
        allowed = {name: tuple(config.allowed.get(name, knob.values)) for name, knob in TUNABLES.items()}
        if any(values and values != TUNABLES[name].values for name, values in allowed.items()):
            raise ValueError("a policy may move a knob to all of its values or to none")
        return cls(
            window_s=config.window_s,
            dwell_s=dict(config.dwell_s),
            rates={kind: (limit.changes, limit.per_s) for kind, limit in config.rates.items()},
            retry_s=config.retry_s,
            knobs=[name for name, values in allowed.items() if values],
        )

    def config(self) -> GuardConfig:
        allowed: dict[str, tuple[TunableValue, ...]] = {name: () for name in TUNABLES if name not in self.knobs}
        return GuardConfig(
            window_s=self.window_s,
            allowed=allowed,
            dwell_s=self.dwell_s,
            rates={kind: RateLimit(changes, per_s) for kind, (changes, per_s) in self.rates.items()},
            retry_s=self.retry_s,
        )


class Traffic(Strict):
    """What it was trained on: a workload of the catalogue, or a trace with the digest of its requests."""

    name: Text
    rate_scale: Positive
    sha256: Sha256 | None = None


class Training(Strict):
    """``seed``: of the run; ``episode_seeds``: what is never drawn for held-out scores. ``steps``: of the exported
    weights. ``teacher``: the rules that it began from, None for none.
    """

    traffic: list[Traffic]
    seed: int
    steps: Annotated[int, Field(ge=0)]
    episodes: Annotated[int, Field(ge=0)]
    episode_s: Positive
    envs: Annotated[int, Field(ge=1)]
    teacher: Text | None
    randomisation: dict[str, tuple[float, float]]


class Score(Strict):
    """Of one policy over the same held-out episodes: mean and 95 % bootstrap interval over episodes."""

    policy: Text
    figure: Literal["reward", "goodput_rps", "loss_per_token"]
    mean: float
    low: float
    high: float
    episodes: Annotated[int, Field(ge=1)]


class ProfileOf(Strict):
    """The profile that it was trained on."""

    digest: Sha256
    description: Text
    estimated: bool


class Card(Strict):
    """See the module. ``interval_s``: between two decisions; ``short_s`` and ``long_s``: the observation's windows.
    Targets: the median over what it was trained on. ``advisor``: the policy whose advice it sees and may overrule
    (``predictor`` or a preset), None for one that decides alone.
    """

    kind: Literal["kv-autotune policy"] = "kv-autotune policy"
    version: Literal[1] = 1
    name: Name
    created: Text
    algorithm: Literal["ppo", "maskable-ppo", "dqn"]
    environment: Text
    spaces: Spaces
    interval_s: Positive
    short_s: Positive
    long_s: Positive
    objective: Literal["interactive", "batch"]
    ttft_target_s: Positive
    tbt_target_s: Positive
    guard: GuardLimits
    network: Network
    normaliser: Normaliser
    ranges: list[Range]
    training: Training
    scores: list[Score]
    profile: ProfileOf
    sha256: Sha256
    versions: dict[str, Text]
    advisor: Name | None = None

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        entries = len(self.spaces.observation)
        if len(self.normaliser.mean) != entries or len(self.normaliser.var) != entries:
            found = f"{len(self.normaliser.mean)} means and {len(self.normaliser.var)} variances"
            raise ValueError(f"normaliser statistics are missing: {found} for {entries} entries")
        if self.network.widths[0] != entries or self.network.widths[-1] != self.spaces.actions:
            raise ValueError(
                f"the network goes from {self.network.widths[0]} to {self.network.widths[-1]}, "
                f"the spaces from {entries} to {self.spaces.actions}"
            )
        if self.network.skip not in ({0} if self.advisor is None else {ADVICE_ENTRIES}):
            raise ValueError(f"{self.network.skip} inputs go past the network, for the advisor {self.advisor}")
        return self

    def objection(self, profile_digest: str | None = None) -> str | None:
        """Why this program cannot run it, in one line. ``profile_digest``: of the loaded profile, None without one."""
        if self.environment != SIMULATED_ENGINE_ID:
            return f"it was trained in {self.environment!r:.80}; this version has {SIMULATED_ENGINE_ID}"
        differs = self.spaces.objection(advised=self.advisor is not None)
        if differs is not None:
            return differs
        if len(self.ranges) != len(FEATURES):
            return f"training ranges are missing: {len(self.ranges)} for {len(FEATURES)} features"
        unknown = [name for name in self.guard.knobs if name not in TUNABLES]
        if unknown:
            return f"it moves {unknown[0]!r:.60}, which is no tunable"
        if profile_digest is not None and profile_digest != self.profile.digest:
            return (
                f"it was trained on another profile: {self.profile.description[:120]} "
                f"({self.profile.digest[:12]}, loaded is {profile_digest[:12]})"
            )
        return None


def read_card(folder: Path) -> Card:
    """The card alone, well-formed; whether it fits is another question. Raises PolicyFileError."""
    return _card(folder / CARD_FILE)


def read_policy(folder: Path, *, profile_digest: str | None = None) -> tuple[Card, Tensors]:
    """Card and weights (float32, by the names in :class:`Network`), checked. Raises PolicyFileError."""
    card = read_card(folder)
    why_not = card.objection(profile_digest)
    if why_not is not None:
        raise PolicyFileError(f"{folder}: {why_not}")
    data = file_bytes(folder / WEIGHTS_FILE, MAX_WEIGHTS_BYTES)
    if hashlib.sha256(data).hexdigest() != card.sha256:
        raise PolicyFileError(f"{folder / WEIGHTS_FILE}: its sha256 is not the card's; the weights are other ones")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyFileError(f"{folder / WEIGHTS_FILE}: not safetensors: {short_line(error)}") from error
    check_tensors(tensors, card.network, f"{folder / WEIGHTS_FILE}")
    return card, tensors


def check_tensors(tensors: Tensors, network: Network, where: str) -> None:
    """Raises PolicyFileError unless they are exactly the network's: names, shapes, float32, finite."""
    wanted: dict[str, tuple[int, ...]] = {}
    for layer, shape in enumerate(network.shapes()):
        wanted |= {f"{layer}.weight": shape, f"{layer}.bias": shape[:1]}
    if set(tensors) != set(wanted):
        odd = sorted(set(tensors) ^ set(wanted))
        raise PolicyFileError(f"{where}: its tensors are not the card's: {', '.join(odd)[:200]}")
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype != np.float32:
            raise PolicyFileError(
                f"{where}: {name} is {tensor.dtype} {list(tensor.shape)}, the card says float32 {list(shape)}"
            )
        if not np.isfinite(tensor).all():
            raise PolicyFileError(f"{where}: {name} has values that are not finite")


def _card(path: Path) -> Card:
    data = file_bytes(path, MAX_CARD_BYTES)
    try:
        return Card.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        missing = (
            "normaliser statistics are missing: "
            if place.startswith("normaliser") and "missing" in first["type"]
            else ""
        )
        raise PolicyFileError(
            f"{path}: no usable card: {missing}{place or 'file'}: {short_line(first['msg'])}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PolicyFileError(f"{path}: no usable card: {short_line(error)}") from error


def file_bytes(path: Path, limit: int) -> bytes:
    """Read once, so that what is checked is what is used. Raises PolicyFileError, for more than ``limit`` and for what
    is no plain file, too: a pipe would be waited for, and a device never ends.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:  # Path.open takes no opener
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PolicyFileError(f"{path}: it is no plain file")
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else short_line(error)
        raise PolicyFileError(f"{path}: {reason}") from error
    if len(data) > limit:
        raise PolicyFileError(f"{path}: larger than the {limit} bytes that it may have")
    return data


def _without_waiting(path: str, flags: int) -> int:
    """Opening a pipe that nobody writes to, or a terminal, returns at once; to plain files it makes no difference."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def check_name(entry: Path) -> None:
    """Of a file or folder that was found, not named: who is told of it shows its name. Raises PolicyFileError."""
    if not entry.name.isprintable():  # bytes that are no UTF-8 are not, either
        raise PolicyFileError("its name is no printable text")


def short_line(what: object) -> str:
    """What another library says, as part of a line."""
    return " ".join(str(what).split())[:200]


def card_text(card: Card) -> str:
    """The card as it is written."""
    document: dict[str, Any] = card.model_dump(mode="json")
    return json.dumps(document, indent=1) + "\n"
