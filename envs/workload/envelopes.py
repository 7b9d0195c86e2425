"""Read a rate over time, where a source publishes no requests: digitised plots and per-window summaries.

Columns: ``t_s`` (start of each piece) and ``rps``, ``rate_rps`` or ``rps_mid``, optionally ``rate_weighted_cv`` or
``gap_cv``. ServeGen's envelopes of 10 minutes and the digitised week of the Azure 2024 trace are of this form.

ServeGen's figure is the mean over clients of each one's own CV, weighted by rate. Drawn as one Gamma stream of that CV,
long windows disperse as the sum of the clients does (at the least: the weighted mean of squares is no smaller than
this mean squared), while neighbouring gaps are more uneven than those of many clients put together.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from envs.workload.arrivals import MOST_RPS, Envelope
from envs.workload.forms import finite
from envs.workload.loaders import open_text, rows
from envs.workload.trace import TraceError

_RATES = ("rps", "rate_rps", "rps_mid")
_CVS = ("rate_weighted_cv", "gap_cv")
_FARTHEST = 3.0  # a repaired time lies at most this many usual steps behind the one before it


@dataclass(frozen=True)
class LoadedEnvelope:
    """``notes``: what had to be done to the source, one line each."""

    envelope: Envelope
    notes: tuple[str, ...] = ()


def load_envelope(path: Path) -> LoadedEnvelope:
    """The envelope of a file, moved to begin at 0 s; the last piece is as long as the usual one.

    Times that lost trailing zeros when they were written (3030 as 303) are repaired where the step before says how,
    and it is noted. Raises TraceError, ``file:line`` and what was expected.
    """
    times, rates, cvs, lines = _read(path)
    notes = []
    step = _usual_step(times)
    if len(times) < 2 or step <= 0:
        raise TraceError(f"{path.name}: an envelope needs two rows or more, with times that increase")
    repaired = 0
    for index in range(1, len(times)):
        before, time = times[index - 1], times[index]
        while 0 < time <= before:
            time *= 10.0
        if time <= before or (time != times[index] and time - before > _FARTHEST * step):
            raise TraceError(f"{path.name}:{lines[index]}: expected a time after {before:g} s, got {times[index]:g}")
        repaired += time != times[index]
        times[index] = time
    if repaired:
        notes.append(f"{repaired} of {len(times)} times had lost trailing zeros: repaired")
    edges = (*(time - times[0] for time in times), times[-1] - times[0] + _usual_step(times))
    if not any(rates):
        raise TraceError(f"{path.name}: nothing arrives by it, every rate is 0")
    return LoadedEnvelope(Envelope(edges, tuple(rates), tuple(cvs) if cvs else None), tuple(notes))


def _usual_step(times: list[float]) -> float:
    return median([after - before for before, after in pairwise(times) if after > before] or [0.0])


def _read(path: Path) -> tuple[list[float], list[float], list[float], list[int]]:
    times, rates, cvs, lines = [], [], [], []
    try:
        with open_text(path) as stream:
            for line, row in rows(stream, path.name, _check):
                place = f"{path.name}:{line}"
                if isinstance(row, str):
                    raise TraceError(f"{place}: {row}")
                _check(list(row), place)
                time, rate = (_number(row, _one_of(names, row), place) for names in (("t_s",), _RATES))
                if not 0 <= rate <= MOST_RPS:
                    raise TraceError(f"{place}: expected a rate from 0 to {MOST_RPS:g}, got {rate:g}")
                times.append(time)
                rates.append(rate)
                lines.append(line)
                cv_column = next((name for name in _CVS if name in row), None)
                if cv_column is not None:
                    cvs.append(_number(row, cv_column, place))
                    if cvs[-1] <= 0:
                        raise TraceError(f"{place}: expected a coefficient of variation > 0, got {cvs[-1]:g}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TraceError(f"{path}: cannot be read: {reason}") from None
    return times, rates, cvs, lines


def _check(columns: list[str], place: str) -> None:
    if "t_s" not in columns or not set(_RATES) & set(columns):
        raise TraceError(f"{place}: expected the columns t_s and {' or '.join(_RATES)}, got {', '.join(columns[:8])}")


def _one_of(names: tuple[str, ...], row: dict[str, object]) -> str:
    return next(name for name in names if name in row)


def _number(row: dict[str, object], column: str, place: str) -> float:
    try:
        return finite(row[column])
    except (ValueError, TypeError):
        raise TraceError(f"{place}: expected a number in {column!r}, got {row[column]!r}") from None
