"""Builds profiles: by measuring a model here, from a data sheet, or by watching a running server."""

from __future__ import annotations

import time
from collections.abc import Iterable
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
from envs.metrics_fit import TOLD, Window, fit_windows, read_page, window
from envs.profile import FitError, Profile, Quality

if TYPE_CHECKING:
    from engine.models.config import ModelConfig
    from engine.quality.table import QualityTable
    from envs.measured import Progress

FALLBACK_DEVICE: Final = "H100"
_PACKAGES: Final = ("kv-autotune", "torch", "triton", "numba", "numpy")


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
    if path.is_dir() or not path.exists():
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
    found: list[Window] = []
    try:
        for before, after in pairwise([read_page(page) for page in pages]):
            one = window(before, after)
            if one is not None:
                found.append(one)
        groups = base.groups()
        native = sum(token_bytes(group.shape, NATIVE) for group in groups)
        layers = sum(len(group.layers) for group in groups)
        fit = fit_windows(found, native / layers, url, _prices(base))
    except ValueError as error:
        raise EngineError(f"{url}: {error}") from error
    terms = {
        name: term.model_copy(update={"seconds": fit.seconds[name], "estimated": False})
        if name in fit.seconds
        else term
        for name, term in base.latency.terms.items()
    }
    if "prefill_token" in fit.seconds:
        # What was fitted holds for all widths that were seen; the estimated knee would come on top of it.
        terms["token_beyond_knee"] = terms["token_beyond_knee"].model_copy(update={"seconds": 0.0})
    untold = "".join(f"; {name} {why}" for name, why in fit.untold.items())
    note = (
        f"fitted to {fit.windows} windows of {url}: {', '.join(fit.seconds)}{untold}; all else is estimated from "
        f"{base.device.name}'s data sheet"
    )
    steps = FitError(samples=fit.windows, median=fit.median_error, p90=fit.p90_error)
    latency = base.latency.model_copy(update={"terms": terms, "steps": steps})
    return base.model_copy(update={"source": "metrics", "latency": latency, "notes": [*base.notes, note]})


def _prices(base: Profile) -> dict[str, float]:
    """What a sequence, a prompt's token and KV are estimated to cost, for what the fit cannot tell."""
    terms = base.latency.terms
    return {name: terms[name].seconds for name in TOLD}


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
    return Quality(by_format=losses, evicted_by=_evictions(table))


def _evictions(table: QualityTable) -> dict[str, float]:
    """What evicting everything would cost, by the way of evicting: from each row's cost and the share that it drops of
    a prompt, the dearest of a way's rows.
    """
    prompt, losses = table.conditions.get("prompt_tokens"), dict[str, float]()
    if not isinstance(prompt, int) or prompt <= 0:
        return losses
    for row in table.settings.values():
        way, kept = row.values.get("eviction"), row.values.get("keep_tokens")
        if set(row.values) != {"eviction", "keep_tokens"} or not isinstance(way, str) or not isinstance(kept, int):
            continue
        if kept < prompt:
            loss = max(0.0, row.judged.increase_pct / 100) / (1 - kept / prompt)
            losses[way] = max(losses.get(way, 0.0), loss)
    return losses


def measure(
    path: Path,
    *,
    pool_bytes: int,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    quick: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """Measure a model folder on this machine. Raises EngineError for anything a user can put right."""
    import torch  # noqa: PLC0415

    from engine.loader import load_model  # noqa: PLC0415
    from envs.measured import measure_profile  # noqa: PLC0415

    if threads is not None:
        torch.set_num_threads(threads)
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    loaded = load_model(path, where, dtype)
    return measure_profile(
        loaded, pool_bytes=pool_bytes, created=now(), versions=versions(), quick=quick, progress=progress
    )
