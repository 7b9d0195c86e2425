"""The profile of one model on one device: what a simulation needs to know. YAML, versioned, with a digest. No torch.

What was measured, what was fitted to a running server, and what is only *estimated* are told apart term by term.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import EngineError
from engine.formats import BLOCK_SIZES, FORMATS, KVShape, class_for
from engine.memory_model import GroupSpec, blocks_per_slab, pool_layout
from engine.step_counts import ALL_TERMS
from engine.transfers import HostLink
from engine.whole_file import write_whole
from engine.yaml_text import YamlError, load_yaml
from envs.latency_model import LatencyModel
from envs.reward import QualityTable, literature_quality

VERSION = 1
# Median relative error of a fit. A quiet machine gets to 4 %, and --quick to 6 to 9 %.
POOR_FIT = 0.15
_Positive = Annotated[float, Field(gt=0)]
_Seconds = Annotated[float, Field(ge=0)]
_Loss = Annotated[float, Field(ge=0, le=1e6)]
_Count = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Group(_Strict):
    """A layer group: see :class:`engine.memory_model.GroupSpec`."""

    name: str
    layers: list[int]
    kv_heads: int
    head_dim: int
    element_bytes: int
    window: int | None = None

    @classmethod
    def of(cls, spec: GroupSpec) -> Self:
        shape = spec.shape
        return cls(
            name=spec.name,
            layers=list(spec.layers),
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            element_bytes=shape.element_bytes,
            window=spec.window,
        )

    def spec(self) -> GroupSpec:
        shape = KVShape(len(self.layers), self.kv_heads, self.head_dim, self.element_bytes)
        return GroupSpec(self.name, tuple(self.layers), shape, self.window)


class Model(_Strict):
    """``sha256``: of configuration and weights, None where only a configuration was read."""

    name: str
    architecture: str
    dtype: str
    max_model_len: _Count
    vocab_size: _Count
    groups: Annotated[list[Group], Field(min_length=1)]
    sha256: str | None = None


class Device(_Strict):
    """``bandwidth_bytes_per_s``: of its memory, as the engine reports it. ``threads``: of a CPU."""

    name: str
    bandwidth_bytes_per_s: _Positive | None = None
    threads: int | None = None


class TermValue(_Strict):
    """One coefficient: seconds per ``unit``."""

    seconds: _Seconds
    unit: str
    estimated: bool = False


class FitError(_Strict):
    """Relative error over samples left out of the fit: median and 90th percentile."""

    samples: int
    median: _Seconds
    p90: _Seconds


class Latency(_Strict):
    """Every term of :mod:`engine.step_counts`; ``steps`` and ``recodes``: how well they were fitted, None if not."""

    knee_tokens: int = Field(ge=1)
    terms: dict[str, TermValue]
    steps: FitError | None = None
    recodes: FitError | None = None


class Capacity(_Strict):
    """Blocks that the pool holds when all of it is of one class, the reserve kept; exact."""

    kv_format: str
    block_size: int
    blocks: int
    tokens: int


class Quality(_Strict):
    """Relative loss of a token whose whole context is stored in a format, or evicted: in any way (None: not known), or
    by the way of evicting. ``estimated``: published figures and guesses, nothing of this model.
    """

    by_format: dict[str, _Loss]
    evicted: _Loss | None = None
    evicted_by: dict[str, _Loss] = {}
    estimated: bool = False


class Offload(_Strict):
    """The link to host memory. ``crossover_tokens``: from how many on moving KV is cheaper than computing it again."""

    bytes_per_s: _Positive
    transfer_s: _Seconds = 0.0
    crossover_tokens: int | None = None
    emulated: bool = False
    estimated: bool = False


class Profile(_Strict):
    """See the module. ``source``: ``measured`` on the device, ``analytic`` from its data sheet, or ``metrics`` of a
    running server. ``quality`` and ``offload`` are None where unknown.
    """

    kind: Literal["kv-autotune profile"] = "kv-autotune profile"
    version: Literal[1] = 1
    source: Literal["measured", "analytic", "metrics"]
    created: str
    device: Device
    versions: dict[str, str]
    model: Model
    pool_bytes: int = Field(gt=0)
    latency: Latency
    capacity: list[Capacity]
    quality: Quality | None = None
    offload: Offload | None = None
    notes: list[str] = []

    def groups(self) -> list[GroupSpec]:
        return [group.spec() for group in self.model.groups]

    def latency_model(self) -> LatencyModel:
        """What the terms cost. Raises ValueError for a term that this version does not know."""
        return LatencyModel({name: term.seconds for name, term in self.latency.terms.items()}, self.latency.knee_tokens)

    def host_link(self) -> HostLink | None:
        """The link to host memory, None where nothing is known of it."""
        if self.offload is None:
            return None
        return HostLink(self.offload.bytes_per_s, self.offload.bytes_per_s, copy_s=self.offload.transfer_s)

    def quality_table(self) -> QualityTable | None:
        """What the formats cost this model, None where not measured. An unknown eviction costs what literature says."""
        if self.quality is None:
            return None
        usual, known = literature_quality(), self.quality.evicted
        by_way = {**usual.evicted_by, **({} if known is None else dict.fromkeys(usual.evicted_by, known))}
        return QualityTable(
            self.quality.by_format, usual.evicted if known is None else known, by_way | self.quality.evicted_by
        )

    @property
    def estimated_terms(self) -> list[str]:
        """Terms whose price nobody has measured."""
        return [name for name, term in self.latency.terms.items() if term.estimated]

    @property
    def is_estimated(self) -> bool:
        return bool(self.estimated_terms)

    @property
    def poor_fits(self) -> dict[str, FitError]:
        """What was fitted with an error that makes simulations doubtful, by name: ``steps``, ``recoding``."""
        fits = {"steps": self.latency.steps, "recoding": self.latency.recodes}
        return {name: fit for name, fit in fits.items() if fit is not None and fit.median > POOR_FIT}

    @property
    def digest(self) -> str:
        """SHA-256 of the content, whatever the layout of the file."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> str:
        """One line for people and reports; says *estimated* and *poor fit* where that is so."""
        what = f"{self.model.name} on {self.device.name}, {self.source} {self.created[:10]}"
        what += "".join(f", POOR FIT ({name} off by {fit.median:.0%})" for name, fit in self.poor_fits.items())
        unsure = len(self.estimated_terms)
        if not unsure:
            return what
        return f"{what}, ESTIMATED ({'all' if unsure == len(self.latency.terms) else unsure} terms)"


class ProfileError(EngineError):
    """A profile that cannot be used; one line."""


def read_profile(path: Path) -> Profile:
    """Raises ProfileError for a file that is missing, no profile, or changed since its digest was written.

    Whoever edits one on purpose removes the digest.
    """
    try:
        data = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: the profile cannot be read: {error.strerror}") from error
    except YamlError as error:
        raise ProfileError(f"{path} is not YAML{error.where}: {error.what}") from error
    except ValueError as error:  # not UTF-8
        raise ProfileError(f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ProfileError(f"{path} is no profile: expected keys and values")
    given = data.pop("digest", None)
    try:
        profile = Profile.model_validate(data)
        profile.latency_model()
        profile.groups()
        profile.quality_table()
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ProfileError(f"{path} is no profile of version {VERSION} ({place}: {first['msg']})") from error
    except ValueError as error:
        raise ProfileError(f"{path}: {error}") from error
    if given is not None and given != profile.digest:
        raise ProfileError(f"{path} was changed after it was written; if that was you, remove its digest line")
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write it with its digest. Raises OSError."""
    document: dict[str, Any] = {"digest": profile.digest, **profile.model_dump(mode="json")}
    write_whole(path, yaml.safe_dump(document, sort_keys=False, width=120))


def terms(seconds: dict[str, float], *, estimated: bool | set[str] = False) -> dict[str, TermValue]:
    """Every declared term with its price, 0 where none is given. ``estimated``: all, none, or those named."""
    return {
        term.name: TermValue(
            seconds=seconds.get(term.name, 0.0),
            unit=term.unit,
            estimated=estimated if isinstance(estimated, bool) else term.name in estimated,
        )
        for term in ALL_TERMS
    }


def capacities(groups: Sequence[GroupSpec], pool_bytes: int, *, reserve_slabs: int = 1) -> list[Capacity]:
    """What the pool holds of every class, from the layout that the engine itself cuts its pool by."""
    layout = pool_layout(groups, pool_bytes)
    rows = []
    for kind in FORMATS:
        for block_size in BLOCK_SIZES:
            block_class = class_for(kind.name, block_size)
            if block_class.block_size != block_size:
                continue  # quantised blocks have at least one tile
            per_slab = min(blocks_per_slab(group.shape, block_class, layout.slab_tokens) for group in groups)
            blocks = (layout.num_slabs - reserve_slabs) * per_slab
            row = Capacity(kv_format=kind.name, block_size=block_size, blocks=blocks, tokens=blocks * block_size)
            rows.append(row)
    return rows
