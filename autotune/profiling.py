"""Builds profiles: by measuring a model here, from a data sheet, or by watching a running server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.errors import EngineError
from engine.formats import NATIVE
from engine.memory_model import token_bytes
from engine.models.folder import read_config, read_json
from engine.models.registry import parse_config
from envs.analytic import analytic_profile
from envs.metrics_fit import Window, fit_windows, read_page, window
from envs.profile import Capacity, Profile, Quality, capacities

if TYPE_CHECKING:
    from engine.models.config import ModelConfig
    from engine.profiling.scenarios import Scenario

FALLBACK_DEVICE: Final = "H100"
_PACKAGES: Final = ("kv-autotune", "torch", "triton", "numba", "numpy")
Progress = Callable[[int, int, str], None]
"""Called with what is done, how much there is, and what is next."""


def versions() -> dict[str, str]:
    """Versions of what decides how fast an engine is, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def now() -> str:
    """The date of a profile, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def model_config(path: Path) -> tuple[ModelConfig, str]:
    """Configuration and name of a model folder, or of a bare config.json."""
    if path.is_dir():
        return parse_config(read_config(path)), path.resolve().name
    return parse_config(read_json(path)), path.resolve().parent.name


def analytic(path: Path, device: str, pool_bytes: int | None = None) -> Profile:
    """Raises EngineError for a model or device that is not known, or one that does not fit the other."""
    config, name = model_config(path)
    try:
        return analytic_profile(config, name, device, created=now(), versions=versions(), pool_bytes=pool_bytes)
    except ValueError as error:
        raise EngineError(str(error)) from error


def from_metrics(base: Profile, url: str, pages: Iterable[str]) -> Profile:
    """``base`` with the terms that the pages of a running server tell; the rest stays as it is.

    Raises EngineError when the server tells too little.
    """
    readings = [read_page(page) for page in pages]
    found: list[Window] = []
    try:
        for before, after in pairwise(readings):
            one = window(before, after)
            if one is not None:
                found.append(one)
        groups = base.groups()
        native = sum(token_bytes(group.shape, NATIVE) for group in groups)
        layers = sum(len(group.layers) for group in groups)
        fit = fit_windows(found, native / layers, url)
    except ValueError as error:
        raise EngineError(f"{url}: {error}") from error
    terms = {
        name: term.model_copy(update={"seconds": fit.seconds[name], "estimated": False})
        if name in fit.seconds
        else term
        for name, term in base.latency.terms.items()
    }
    if "decode_sequence" in fit.seconds:
        # What was fitted holds for all widths that were seen; the estimated knee would come on top of it.
        terms["token_beyond_knee"] = terms["token_beyond_knee"].model_copy(update={"seconds": 0.0})
    note = (
        f"fitted to {fit.windows} windows of {url}: {', '.join(fit.seconds)}; median error {fit.median_error:.1%}; "
        "all else is estimated"
    )
    latency = base.latency.model_copy(update={"terms": terms})
    return base.model_copy(update={"source": "metrics", "latency": latency, "notes": [*base.notes, note]})


def read_quality(path: Path, model: Path) -> Quality:
    """The losses in a quality table that ``autotune compare-formats`` wrote. Raises EngineError for another model's."""
    from engine.quality.table import read_table  # noqa: PLC0415

    table = read_table(path)
    table.check_model(model, path.name)
    losses = {NATIVE.name: 0.0}
    for name in ("int8", "k8v4", "int4"):
        row = table.row_of_format(name)
        if row is None:
            raise EngineError(f"{path}: no row for {name}; measure all formats with autotune compare-formats")
        losses[name] = max(0.0, row.judged.increase_pct / 100)
    return Quality(by_format=losses)


def measure(
    path: Path,
    *,
    pool_bytes: int,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    quick: bool = False,
    progress: Progress,
) -> Profile:
    """Measure a model on this machine. Raises EngineError for anything a user can put right."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from engine.assembly import measure_bandwidth  # noqa: PLC0415
    from engine.loader import load_model  # noqa: PLC0415
    from engine.profiling.measure import Measurer  # noqa: PLC0415
    from engine.profiling.scenarios import scenarios  # noqa: PLC0415
    from engine.quality.digest import model_digest  # noqa: PLC0415
    from envs.latency_fit import fit_recodes, fit_steps  # noqa: PLC0415
    from envs.profile import Device, FitError, Group, Latency, Model, terms  # noqa: PLC0415

    if threads is not None:
        torch.set_num_threads(threads)
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    loaded = load_model(path, where, dtype)
    try:
        measurer = Measurer(loaded, pool_bytes)
    except (ValueError, RuntimeError) as error:
        raise EngineError(f"a KV pool of {pool_bytes} bytes does not do: {error}") from error
    chosen = scenarios(
        pool_tokens=measurer.pool_tokens, max_model_len=loaded.config.max_model_len, max_tokens=25_000, quick=quick
    )
    if not chosen:
        raise EngineError("the pool is too small to measure anything; give more with --kv-pool-bytes")
    progress(0, len(chosen), "compiling kernels")
    measurer.warm_up()
    done = 0

    def count(scenario: Scenario) -> None:
        nonlocal done
        done += 1
        progress(done, len(chosen), _describe(scenario))

    samples = measurer.run(chosen, count)
    steps = fit_steps(np.array(samples.step_counts), np.array(samples.step_s))
    recodes = fit_recodes(np.array(samples.recode_counts), np.array(samples.recode_s))
    config, target = loaded.config, loaded.model.device
    is_cuda = target.type == "cuda"
    return Profile(
        source="measured",
        created=now(),
        device=Device(
            name=torch.cuda.get_device_name(target) if is_cuda else "cpu",
            bandwidth_bytes_per_s=measure_bandwidth(target),
            threads=None if is_cuda else torch.get_num_threads(),
        ),
        versions=versions(),
        model=Model(
            name=loaded.name,
            architecture=config.architecture,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            groups=[Group.of(group) for group in loaded.groups],
            sha256=model_digest(path),
        ),
        pool_bytes=pool_bytes,
        latency=Latency(
            knee_tokens=steps.knee_tokens,
            terms=terms({**steps.seconds, **_all_pairs(recodes.seconds)}, estimated=_unseen(samples.recode_counts)),
            steps=FitError(**vars(steps.error)),
            recodes=FitError(**vars(recodes.error)),
        ),
        capacity=_capacity(loaded.groups, pool_bytes),
        notes=["a quick measurement: few scenarios"] if quick else [],
    )


def _capacity(groups: Iterable[object], pool_bytes: int) -> list[Capacity]:
    return capacities(list(groups), pool_bytes)  # type: ignore[arg-type]


def _describe(scenario: Scenario) -> str:
    return (
        f"{scenario.batch} x {scenario.context} tokens, {scenario.kv_format} in blocks of {scenario.block_size}, "
        f"budget {scenario.budget}"
    )


def _unseen(counts: list[list[int]]) -> set[str]:
    from engine.step_counts import RECODE_NAMES  # noqa: PLC0415

    return {name for index, name in enumerate(RECODE_NAMES) if not any(row[index] for row in counts)}


def _all_pairs(seconds: Mapping[str, float]) -> dict[str, float]:
    """Conversions that were not measured cost as much as the dearest that was (estimated)."""
    from engine.step_counts import RECODES  # noqa: PLC0415

    dearest = max((value for name, value in seconds.items() if name != "recode"), default=0.0)
    return {f"recode_{a}_{b}": dearest for a, b in RECODES} | dict(seconds)
