"""How true predicted effects are: fixed settings at fixed rates, simulated, against what was predicted for them.

``python -m policies.bench_effects [--quick] [--profile FILE]``; the last line is JSON. Every cell is a fresh engine
under Poisson arrivals with the lengths of a built-in workload. The prediction is made from the observation in the
middle of the run, for the time that is left; what then happens is what it is held against. Errors are relative, ranks
are compared over all cells of a profile by Spearman's correlation. Waits for longer than the run are no steady figure,
so cells that are asked for more than they can serve count for ranks and occupancy only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from engine.tunables import TunableValue, default_values
from envs.ledger import TrueFigures
from envs.profile import Profile, read_profile
from envs.reward import literature_quality
from envs.signals import Targets
from envs.simulated import SimulatedEngine
from envs.spaces import NOTHING
from envs.workload.arrivals import Envelope
from envs.workload.catalogue import CATALOGUE
from policies.effects import Effect, EffectModel, places_of
from policies.load import Lengths, Load, load_of

PROFILES: Final = Path(__file__).parent.parent / "envs" / "profiles"
WORKLOADS: Final = ("chat-steady", "reasoning-bursty")  # whose lengths are used; none of the held-out ones
SHARES: Final = (0.25, 0.6, 0.85, 1.2)  # of the rate that native can serve
SETTINGS: Final[tuple[Mapping[str, TunableValue], ...]] = (
    {},
    {"block_size": 128},
    {"kv_format": "int8", "block_size": 32},
    {"kv_format": "int4", "block_size": 32},
    {"max_num_batched_tokens": 128},
    {"max_num_batched_tokens": 2048},
    {"max_num_seqs": 8},
    {"kv_format": "int8", "block_size": 32, "max_num_seqs": 256},
    {"eviction": "window", "keep_tokens": 512},
)
FIGURES: Final = ("ttft_s", "tbt_s", "kv_occupancy", "running")
_WARM_UP_S: Final = 120.0


@dataclass(frozen=True)
class Cell:
    """One setting at one rate. ``known``: predicted from the load that did come, ``predicted``: from what the
    windows showed before. ``simulated``: by figure; one that did not occur is missing.
    """

    profile: str
    workload: str
    share: float
    values: Mapping[str, TunableValue]
    overloaded: bool
    known: Mapping[str, float]
    predicted: Mapping[str, float]
    simulated: Mapping[str, float]


def measure(
    profile: Profile, workload: str, rate_rps: float, values: Mapping[str, TunableValue], duration_s: float, seed: int
) -> tuple[Effect, Effect, dict[str, float]]:
    """Predict in the middle of a run, and see. Raises ValueError if the windows told nothing then."""
    targets = Targets(2.0, 0.25)
    plain = replace(CATALOGUE[workload], rate=Envelope.constant(rate_rps, 3600.0), gap_cv=1.0)
    env = SimulatedEngine(
        profile, plain, rate_scale=1.0, interval_s=1.0, warm_up_s=_WARM_UP_S, episode_s=_WARM_UP_S + duration_s,
        values=values, targets=targets, repeats=False,
    )  # fmt: skip
    _, info = env.reset(seed=seed)
    quality = profile.quality_table() or literature_quality()
    model = EffectModel(profile.groups(), profile.pool_bytes, profile.latency_model(), quality, targets)
    load = load_of(info["observation"])
    if load is None:
        raise ValueError(f"{workload} at {rate_rps:g} requests/s: nothing has ended after {_WARM_UP_S:g} s")
    row = np.array([places_of({**default_values(), **values})])
    effect = model.effects(row, load, horizon_s=duration_s).row(0)
    total, usage, running = TrueFigures(), [], []
    for _ in range(round(duration_s)):
        _, _, _, _, info = env.step(NOTHING)
        figures, gauges = env.last_figures, info["stats"].gauges
        total.offered += figures.offered
        total.ttft_ns += figures.ttft_ns
        for gap_ns, times in figures.gaps.items():
            total.gaps[gap_ns] = total.gaps.get(gap_ns, 0) + times
        usage.append(gauges.kv_usage)
        running.append(gauges.running)
    seen = {
        "ttft_s": total.ttft_quantile_s(targets.quantile),
        "tbt_s": total.tbt_quantile_s(targets.quantile),
        "kv_occupancy": statistics.fmean(usage),
        "running": statistics.fmean(running),
    }
    came = known_load(workload, total.offered / duration_s)
    came = replace(load, rate_rps=came.rate_rps, prompt=came.prompt, output=came.output)
    known = model.effects(row, came, horizon_s=duration_s).row(0)
    return effect, known, {name: value for name, value in seen.items() if value is not None}


def known_load(workload: str, rate_rps: float) -> Load:
    """A workload's own lengths at a rate."""
    chosen, rng = CATALOGUE[workload], np.random.default_rng(0)
    drawn = [np.array(lengths.draw(20_000, rng), float) for lengths in (chosen.prompt, chosen.output)]
    prompt, output = (Lengths.of_moments(float(tokens.mean()), float((tokens**2).mean())) for tokens in drawn)
    return Load(rate_rps, prompt, output)


def native_rps(profile: Profile, workload: str) -> float:
    """What the model says that the defaults can serve of a workload's lengths: rates are set by it."""
    quality = profile.quality_table() or literature_quality()
    model = EffectModel(profile.groups(), profile.pool_bytes, profile.latency_model(), quality, Targets())
    return float(model.effects(np.array([places_of(default_values())]), known_load(workload, 1.0)).most_rps[0])


def cells(profile: Profile, shares: Sequence[float], duration_s: float) -> Iterator[Cell]:
    for workload in WORKLOADS:
        most = native_rps(profile, workload)
        for share in shares:
            for number, values in enumerate(SETTINGS):
                effect, known, seen = measure(profile, workload, share * most, values, duration_s, seed=number)
                overloaded = known.most_rps < share * most
                name = f"{profile.model.name} on {profile.device.name}"
                yield Cell(name, workload, share, values, overloaded, asdict(known), asdict(effect), seen)


def summary(rows: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """By figure: rank correlation over all cells, median and 90th percentile of the relative error where it is steady;
    ``known_...`` the same for the load that did come, which leaves the model's own error.
    """
    result: dict[str, dict[str, float]] = {}
    for name in FIGURES:
        here = [cell for cell in rows if cell.simulated.get(name, 0.0) > 0]
        seen = [cell.simulated[name] for cell in here]
        result[name] = {"cells": float(len(here))}
        for prefix, guesses in (("", [c.predicted[name] for c in here]), ("known_", [c.known[name] for c in here])):
            errors = sorted(
                abs(guess - figure) / figure
                for guess, figure, cell in zip(guesses, seen, here, strict=True)
                if not (cell.overloaded and name == "ttft_s")
            )
            result[name] |= {
                f"{prefix}rank_correlation": spearman(guesses, seen),
                f"{prefix}median_error": statistics.median(errors),
                f"{prefix}p90_error": errors[int(0.9 * (len(errors) - 1))],
            }
    return result


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation, ties sharing their mean rank."""
    return float(np.corrcoef(_ranks(left), _ranks(right))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return [float(last[place] - (counts[place] - 1) / 2) for place in inverse]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="two rates and shorter runs")
    parser.add_argument("--profile", type=Path, action="append", help="repeatable; the bundled ones if absent")
    parser.add_argument("--cells", action="store_true", help="print every cell")
    chosen = parser.parse_args(arguments)
    paths = chosen.profile or sorted(PROFILES.glob("*.yaml"))
    report = {}
    for path in paths:
        profile, rows = read_profile(path), []
        for cell in cells(profile, SHARES[1:3] if chosen.quick else SHARES, 60.0 if chosen.quick else 180.0):
            rows.append(cell)
            if chosen.cells:
                print(_line(cell), flush=True)
        report[path.stem] = summary(rows)
        for name, figures in report[path.stem].items():
            text = "  ".join(f"{key} {value:.3g}" for key, value in figures.items())
            print(f"{path.stem:30} {name:14} {text}", flush=True)
    print(json.dumps({"bench": "effects", "quick": chosen.quick, "profiles": report}))
    return 0


def _line(cell: Cell) -> str:
    values = ",".join(f"{knob}={value}" for knob, value in cell.values.items()) or "default"
    both = "  ".join(
        f"{name} {cell.known[name]:.3g}/{cell.predicted[name]:.3g}/{cell.simulated.get(name, float('nan')):.3g}"
        for name in FIGURES
    )
    return f"{cell.workload:18}{cell.share:5.2f}  {both}  {values}{'  overloaded' if cell.overloaded else ''}"


if __name__ == "__main__":
    sys.exit(main())
