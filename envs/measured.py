"""Measures a model on this machine and makes its profile. torch is imported only when called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.clock import Clock
from engine.errors import EngineError
from engine.step_counts import RECODE_NAMES, RECODES
from engine.transfers import EMULATED_LINK_SHARE, HostLink
from envs import latency_fit
from envs.latency_model import LatencyModel
from envs.offload import crossover_tokens
from envs.profile import Device, FitError, Group, Latency, Model, Offload, Profile, TermValue, capacities, terms

if TYPE_CHECKING:
    from engine.loader import LoadedModel
    from engine.profiling.measure import Samples
    from engine.profiling.scenarios import Scenario

Progress = Callable[[int, int, str], None]
"""Called with what is done, how much there is, and what was done last."""

_MOST_TOKENS = 25_000  # prompt tokens of one load


@dataclass(frozen=True)
class Fitted:
    """A price for every term, the model of them, and how well steps and conversions were fitted."""

    prices: dict[str, TermValue]
    model: LatencyModel
    steps: latency_fit.FitError
    recodes: latency_fit.FitError


def fit(samples: Samples) -> Fitted:
    """The latency model of measured steps and conversions, neither of them none."""
    steps = latency_fit.fit_steps(
        np.array(samples.step_counts), np.array(samples.step_s), np.array(samples.step_repeats)
    )
    recodes = latency_fit.fit_recodes(np.array(samples.recode_counts), np.array(samples.recode_s))
    prices = terms({**steps.seconds, **_all_pairs(recodes.seconds)}, estimated=_unseen(samples.recode_counts))
    model = LatencyModel({name: price.seconds for name, price in prices.items()}, steps.knee_tokens)
    return Fitted(prices, model, steps.error, recodes.error)


def measure_profile(
    loaded: LoadedModel,
    *,
    pool_bytes: int,
    created: str,
    versions: dict[str, str],
    quick: bool = False,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Profile:
    """Run the scenarios of :mod:`engine.profiling` on a loaded model and fit them. ``clock``: the machine's by default.

    Raises EngineError for a pool that is too small or does not fit the device.
    """
    import torch  # noqa: PLC0415

    from engine.bandwidth import measure_bandwidth, measure_link  # noqa: PLC0415
    from engine.profiling.measure import REPEATS, Measurer, is_large  # noqa: PLC0415
    from engine.profiling.scenarios import scenarios  # noqa: PLC0415
    from engine.quality.digest import model_digest  # noqa: PLC0415

    config, target = loaded.config, loaded.model.device
    try:
        measurer = Measurer(loaded, pool_bytes, clock=clock)
    except (ValueError, RuntimeError) as error:
        raise EngineError(f"a KV pool of {pool_bytes} bytes does not do: {error}") from error
    chosen = scenarios(
        pool_tokens=measurer.pool_tokens, max_model_len=config.max_model_len, max_tokens=_MOST_TOKENS, quick=quick
    )
    if not chosen:
        raise EngineError("the pool is too small to measure anything; give more with --kv-pool-bytes")
    tell = progress or (lambda *_: None)
    total = len(chosen) + (REPEATS - 1) * sum(not is_large(scenario) for scenario in chosen)
    tell(0, total, "compiling kernels")
    measurer.warm_up()
    done = 0

    def count(scenario: Scenario) -> None:
        nonlocal done
        done += 1
        tell(done, total, _describe(scenario))

    samples = measurer.run(chosen, count)
    if not samples.recode_counts:
        raise EngineError("pool or context are too small to convert anything; give more with --kv-pool-bytes")
    fitted = fit(samples)
    is_cuda = target.type == "cuda"
    bandwidth = measure_bandwidth(target)
    # A profile has one rate for both ways: what comes back is what somebody waits for.
    rate = measure_link(target)[1] if is_cuda else bandwidth * EMULATED_LINK_SHARE
    link = HostLink(rate, rate, is_emulated=not is_cuda)
    model = fitted.model
    return Profile(
        source="measured",
        created=created,
        device=Device(
            name=torch.cuda.get_device_name(target) if is_cuda else "cpu",
            bandwidth_bytes_per_s=bandwidth,
            threads=None if is_cuda else torch.get_num_threads(),
        ),
        versions=versions,
        model=Model(
            name=loaded.name,
            architecture=config.architecture,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            groups=[Group.of(group) for group in loaded.groups],
            sha256=model_digest(Path(loaded.folder)),
        ),
        pool_bytes=pool_bytes,
        latency=Latency(
            knee_tokens=model.knee_tokens,
            terms=fitted.prices,
            steps=FitError(**vars(fitted.steps)),
            recodes=FitError(**vars(fitted.recodes)),
        ),
        capacity=capacities(loaded.groups, pool_bytes),
        offload=Offload(
            bytes_per_s=rate,
            crossover_tokens=crossover_tokens(loaded.groups, model, link, config.max_model_len),
            emulated=link.is_emulated,
        ),
        notes=["a quick measurement: few loads"] if quick else [],
    )


def _describe(scenario: Scenario) -> str:
    return (
        f"{scenario.batch} x {scenario.context} tokens, {scenario.kv_format} in blocks of {scenario.block_size}, "
        f"budget {scenario.budget}"
    )


def _unseen(counts: Sequence[Sequence[int]]) -> set[str]:
    return {name for index, name in enumerate(RECODE_NAMES) if not any(row[index] for row in counts)}


def _all_pairs(seconds: Mapping[str, float]) -> dict[str, float]:
    """Conversions that were not measured cost as much as the dearest that was (estimated)."""
    dearest = max((value for name, value in seconds.items() if name != "recode"), default=0.0)
    return {f"recode_{source}_{target}": dearest for source, target in RECODES} | dict(seconds)
