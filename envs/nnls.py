"""Least squares with coefficients >= 0, in numpy: a service time has no negative parts. (Saves a dependency on scipy.)

The active-set method of Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23, the one behind
``scipy.optimize.nnls``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def nnls(matrix: Floats, target: Floats, *, tolerance: float = 1e-10) -> Floats:
    """The x >= 0 that minimises ``|matrix @ x - target|``; ``matrix`` [samples, terms], ``target`` [samples].

    Columns are scaled to unit length inside, so terms of very different size do not disturb each other. Raises
    ValueError for shapes that do not fit or values that are not finite.
    """
    if matrix.ndim != 2 or target.shape != matrix.shape[:1]:
        raise ValueError(f"shapes do not fit: {matrix.shape} and {target.shape}")
    if not (np.isfinite(matrix).all() and np.isfinite(target).all()):
        raise ValueError("a fit needs finite values")
    lengths = np.linalg.norm(matrix, axis=0)
    used = lengths > 0
    solution = np.zeros(matrix.shape[1])
    if used.any():
        solution[used] = _solve(matrix[:, used] / lengths[used], target, tolerance) / lengths[used]
    return solution


def _solve(matrix: Floats, target: Floats, tolerance: float) -> Floats:
    terms = matrix.shape[1]
    solution = np.zeros(terms)
    passive = np.zeros(terms, dtype=bool)
    limit = tolerance * float(np.linalg.norm(target))
    for _ in range(3 * terms + 10):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= limit:
            break
        passive[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(terms)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            bad = passive & (trial <= 0)
            if not bad.any():
                break
            # Go towards the trial until the first term reaches zero, and leave that term out.
            step = float((solution[bad] / np.maximum(solution[bad] - trial[bad], 1e-300)).min())
            solution += step * (trial - solution)
            passive &= solution > 1e-15
            solution[~passive] = 0.0
        solution = trial
    return solution
