"""Measures a model on this machine and makes its profile. torch is imported only when called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import EngineError
from engine.step_counts import RECODE_NAMES, RECODES
from envs.latency_fit import fit_recodes, fit_steps
from envs.profile import Device, FitError, Group, Latency, Model, Profile, capacities, terms

if TYPE_CHECKING:
    from engine.loader import LoadedModel
    from engine.profiling.scenarios import Scenario

Progress = Callable[[int, int, str], None]
"""Called with what is done, how much there is, and what was done last."""

_MOST_TOKENS = 25_000  # prompt tokens of one load


def measure_profile(
    loaded: LoadedModel,
    *,
    pool_bytes: int,
    created: str,
    versions: dict[str, str],
    quick: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """Run the scenarios of :mod:`engine.profiling` on a loaded model and fit them.

    Raises EngineError for a pool that is too small or does not fit the device.
    """
    import torch  # noqa: PLC0415

    from engine.bandwidth import measure_bandwidth  # noqa: PLC0415
    from engine.profiling.measure import Measurer  # noqa: PLC0415
    from engine.profiling.scenarios import scenarios  # noqa: PLC0415
    from engine.quality.digest import model_digest  # noqa: PLC0415

    config, target = loaded.config, loaded.model.device
    try:
        measurer = Measurer(loaded, pool_bytes)
    except (ValueError, RuntimeError) as error:
        raise EngineError(f"a KV pool of {pool_bytes} bytes does not do: {error}") from error
    chosen = scenarios(
        pool_tokens=measurer.pool_tokens, max_model_len=config.max_model_len, max_tokens=_MOST_TOKENS, quick=quick
    )
    if not chosen:
        raise EngineError("the pool is too small to measure anything; give more with --kv-pool-bytes")
    tell = progress or (lambda *_: None)
    tell(0, len(chosen), "compiling kernels")
    measurer.warm_up()
    done = 0

    def count(scenario: Scenario) -> None:
        nonlocal done
        done += 1
        tell(done, len(chosen), _describe(scenario))

    samples = measurer.run(chosen, count)
    steps = fit_steps(np.array(samples.step_counts), np.array(samples.step_s))
    recodes = fit_recodes(np.array(samples.recode_counts), np.array(samples.recode_s))
    is_cuda = target.type == "cuda"
    return Profile(
        source="measured",
        created=created,
        device=Device(
            name=torch.cuda.get_device_name(target) if is_cuda else "cpu",
            bandwidth_bytes_per_s=measure_bandwidth(target),
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
            knee_tokens=steps.knee_tokens,
            terms=terms({**steps.seconds, **_all_pairs(recodes.seconds)}, estimated=_unseen(samples.recode_counts)),
            steps=FitError(**vars(steps.error)),
            recodes=FitError(**vars(recodes.error)),
        ),
        capacity=capacities(loaded.groups, pool_bytes),
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
