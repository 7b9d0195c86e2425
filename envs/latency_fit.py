"""Fits a latency model to measured steps: non-negative least squares on relative errors. numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine.step_counts import RECODE_NAMES, STEP_INDEX, STEP_NAMES
from envs.latency_model import Ints
from envs.nnls import Floats, nnls

KNEES: Final = (1, 8, 16, 32, 64, 128, 256, 512)
_FOLDS: Final = 5
_ROUNDS: Final = 5


@dataclass(frozen=True)
class FitError:
    """Relative error over samples that the coefficients were not fitted to (five folds): median and 90th percentile."""

    samples: int
    median: float
    p90: float


@dataclass(frozen=True)
class Fit:
    """Seconds per unit of every term that costs anything, and how well they do. Recoding has no knee."""

    seconds: Mapping[str, float]
    error: FitError
    knee_tokens: int = 1


def fit_steps(counts: Ints, times_s: Floats, repeats: Ints | None = None) -> Fit:
    """Coefficients of ``STEP_TERMS`` from measured steps: int64 [samples, terms] and seconds [samples], all > 0.
    ``repeats``: int64 [samples], how many measured steps each time is the mean of; it counts so often.

    The column of ``token_beyond_knee`` is computed here: of the knees in ``KNEES``, the one with the least error.
    """
    tokens = counts[:, STEP_INDEX["prefill_token"]] + counts[:, STEP_INDEX["decode_sequence"]]
    weights = None if repeats is None else repeats.astype(np.float64)
    candidates = []
    for knee in KNEES:
        matrix = counts.astype(np.float64)
        matrix[:, STEP_INDEX["token_beyond_knee"]] = np.maximum(tokens - knee, 0)
        values = _solve(matrix, times_s, weights)
        error = np.average(np.square(matrix @ values / times_s - 1), weights=weights)
        candidates.append((float(error), knee, matrix, values))
    _, knee, matrix, values = min(candidates, key=lambda candidate: candidate[:2])
    return Fit(_named(STEP_NAMES, values), _held_out(matrix, times_s, weights), knee)


def fit_recodes(counts: Ints, times_s: Floats) -> Fit:
    """Coefficients of ``RECODE_TERMS`` from measured conversions: int64 [samples, terms] and seconds [samples] > 0."""
    matrix = counts.astype(np.float64)
    return Fit(_named(RECODE_NAMES, _solve(matrix, times_s)), _held_out(matrix, times_s))


def _named(names: Sequence[str], values: Floats) -> dict[str, float]:
    return {name: float(value) for name, value in zip(names, values, strict=True) if value > 0}


def _solve(matrix: Floats, times_s: Floats, weights: Floats | None = None) -> Floats:
    """Least squares of relative errors: a step of 1 ms counts as much as one of 1 s.

    Relative to what is fitted, in a few rounds: relative to what was measured, times that scatter by a share s would be
    fitted too low by about 2 s^2, for an error counts less where it made the time larger.
    """
    expected, root = times_s, 1.0 if weights is None else np.sqrt(weights)
    for _ in range(_ROUNDS):
        scale = root / expected
        values = nnls(matrix * scale[:, None], times_s * scale)
        fitted = matrix @ values
        expected = np.where(fitted > 0, fitted, times_s)
    return values


def _held_out(matrix: Floats, times_s: Floats, weights: Floats | None = None) -> FitError:
    errors = np.zeros(len(times_s))
    fold = np.arange(len(times_s)) % _FOLDS
    for index in range(_FOLDS):
        rest = fold != index
        if rest.any():
            values = _solve(matrix[rest], times_s[rest], None if weights is None else weights[rest])
            errors[~rest] = np.abs(matrix[~rest] @ values / times_s[~rest] - 1)
    if not len(errors):
        return FitError(0, 0.0, 0.0)
    return FitError(len(errors), float(np.median(errors)), float(np.quantile(errors, 0.9)))
