"""Scores one list of samples under several settings at once, step by step beside the native cache.

All engines plan the same steps, so that a batch has the same composition everywhere and any difference is the cache's:
native against native differs by exactly nothing. Two steps' predictions are compared and dropped, which takes no more
memory for a long text than for a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.clock import Clock, RealClock
from engine.errors import EngineError
from engine.loader import LoadedModel
from engine.quality.samples import Sample
from engine.quality.scoring import Conditions, Predictions, ScoringEngine
from engine.quality.tally import Tally
from engine.tunables import TunableValue

Settings = Mapping[str, Mapping[str, TunableValue]]
NATIVE = "native"


@dataclass(frozen=True)
class Outcome:
    """One setting's result. ``decode_tokens_per_s``: None where no step only decoded."""

    tally: Tally
    decode_tokens_per_s: float | None


def compare(
    loaded: LoadedModel,
    settings: Settings,
    samples: Sequence[Sample],
    *,
    conditions: Conditions | None = None,
    bins: int = 4,
    clock: Clock | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Outcome]:
    """Score ``samples`` under native and every setting (tunables that differ from their defaults), by name.

    ``progress`` is told how many tokens of the samples each step took. Raises EngineError when a sample is too long
    for the model, or the KV pools for all settings do not fit.
    """
    conditions, clock = conditions or Conditions(), clock or RealClock()
    everything: Settings = {NATIVE: {}, **{name: values for name, values in settings.items() if name != NATIVE}}
    engines = {name: ScoringEngine(loaded, samples, values, conditions, clock) for name, values in everything.items()}
    device = loaded.model.device
    tallies = {name: Tally([len(sample.ids) for sample in samples], bins, device) for name in engines}
    native = engines[NATIVE]
    while not native.is_done:
        done = _computed(native)
        found = {name: engine.step() for name, engine in engines.items()}
        reference = found[NATIVE]
        if reference is not None:
            for name, predictions in found.items():
                _tally(tallies[name], reference, predictions)
        if progress is not None:
            progress(_computed(native) - done)
    return {name: Outcome(tallies[name], engine.decode_tokens_per_s) for name, engine in engines.items()}


def _computed(engine: ScoringEngine) -> int:
    counters = engine.engine.scheduler.counters
    return counters.prefill_tokens_computed + counters.decode_tokens_computed


def _tally(tally: Tally, native: Predictions, own: Predictions | None) -> None:
    if own is None or not (torch.equal(native.samples, own.samples) and torch.equal(native.positions, own.positions)):
        raise EngineError("two settings planned different steps; give the pools more bytes or use a smaller batch")
    tally.add(own.samples, own.positions, own.targets, native.logprobs, own.logprobs)
