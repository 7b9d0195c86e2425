"""Read a trace file: CSV or JSON lines, plain or gzip, whatever its ending says."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from engine.json_text import load_json
from envs.workload.arrivals import Envelope, arrivals
from envs.workload.forms import Form, detect, normalise
from envs.workload.trace import Trace, TraceError, TraceRequest, from_requests

GZIP_MAGIC = b"\x1f\x8b"
Row = tuple[int, dict[str, Any] | str]  # line number, and the row or why it cannot be read


def load_trace(
    path: Path,
    *,
    skip_bad_lines: bool = False,
    rate_rps: float | None = None,
    seed: int = 0,
    form: Form | None = None,
) -> Trace:
    """The requests of a file in one of the forms of :mod:`envs.workload.forms`, told apart by header unless given.

    ``rate_rps``: Poisson arrivals for a file that has lengths but no arrival times. ``skip_bad_lines`` counts broken
    lines instead of refusing them. Raises TraceError with ``file:line`` and what was expected.
    """
    reader = TraceReader(path, skip_bad_lines=skip_bad_lines, form=form)
    requests = list(reader)
    if reader.form is None or not requests:
        first = f" (first bad line: {reader.first_skipped})" if reader.skipped else ""
        raise TraceError(f"{path.name}: no requests in it{first}")
    notes = reader.notes()
    if reader.form.arrival is None:
        requests, note = _with_arrivals(requests, path.name, rate_rps, seed)
        notes.append(note)
    block = reader.form.block_tokens
    return from_requests(path.name, requests, block_tokens=block, notes=tuple(notes), skipped_lines=reader.skipped)


def stream_trace(path: Path, *, form: Form | None = None) -> Iterator[TraceRequest]:
    """The requests of a file as they are read, the first at 0 s: a trace of weeks in little memory.

    Raises TraceError as :func:`load_trace` does, and for rows that are not in order of arrival.
    """
    start, last = None, 0.0
    reader = TraceReader(path, form=form)
    for request in reader:
        if reader.form is not None and reader.form.arrival is None:
            raise TraceError(f"{path.name}: has no arrival times to stream by; load it whole, with a rate")
        start = request.arrival_s if start is None else start
        arrival_s = request.arrival_s - start
        if arrival_s < last:
            raise TraceError(f"{path.name}: rows are not in order of arrival; `autotune trace import` sorts them")
        last = arrival_s
        yield replace(request, arrival_s=arrival_s) if start else request


class TraceReader:
    """Iterates over a file once, in its own order and its own time. ``form`` is known from the first row on.

    ``skipped`` broken lines were passed over, ``estimated`` rows say that their lengths are estimates.
    """

    def __init__(self, path: Path, *, skip_bad_lines: bool = False, form: Form | None = None) -> None:
        self.form = form
        self.skipped = self.estimated = 0
        self.first_skipped = ""
        self._path = path
        self._skip_bad_lines = skip_bad_lines

    def __iter__(self) -> Iterator[TraceRequest]:
        try:
            with open_text(self._path) as stream:
                for line, row in rows(stream, self._path.name, self._check_columns):
                    request = self._read(line, row)
                    if request is not None:
                        yield request
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise TraceError(f"{self._path}: cannot be read: {reason}") from None

    def notes(self) -> list[str]:
        """What to say of the file, once it has been read."""
        notes = [f"{self.skipped} broken lines skipped, the first: {self.first_skipped}"] if self.skipped else []
        if self.estimated:
            notes.append(f"{self.estimated} requests have estimated lengths")
        return notes

    def _read(self, line: int, row: dict[str, Any] | str) -> TraceRequest | None:
        try:
            if isinstance(row, str):
                raise ValueError(row)  # noqa: TRY301, TRY004 (same handling as a field that cannot be read)
            if self.form is None:
                self.form = detect(row, f"{self._path.name}:{line}")
            request = self.form.read(row)
        except ValueError as error:
            problem = str(error) if isinstance(error, TraceError) else f"{self._path.name}:{line}: {error}"
            if not self._skip_bad_lines:
                raise TraceError(problem) from None
            self.skipped, self.first_skipped = self.skipped + 1, self.first_skipped or problem
            return None
        self.estimated += bool(row.get("estimated"))
        return request

    def _check_columns(self, columns: list[str], place: str) -> None:
        """A header alone is enough to refuse a table that cannot be read, whatever lines may be skipped."""
        if self.form is None:
            detect(columns, place)
            return
        form = self.form
        for column in (form.prompt, form.output, form.arrival, form.hash_ids, form.source):
            if column is not None and column not in columns:
                raise TraceError(f"{place}: no column {column!r}; it has: {', '.join(columns[:12])}")


def open_text(path: Path) -> IO[str]:
    """A file as text, unpacked if it is gzip."""
    raw = path.open("rb")
    magic = raw.read(2)
    raw.seek(0)
    binary: Any = gzip.GzipFile(fileobj=raw) if magic == GZIP_MAGIC else raw
    return io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")


def rows(stream: IO[str], name: str, check: Callable[[list[str], str], None]) -> Iterator[Row]:
    """Rows with their line numbers; the first non-blank character says JSON lines or CSV.

    ``check`` is given a CSV file's columns (as :func:`normalise` makes them) and where they stand; it may raise.
    """
    position = 1
    first = stream.readline()
    while first and not first.strip():
        position, first = position + 1, stream.readline()
    if first.lstrip().startswith("{"):
        yield from _json_rows(first, stream, position)
    elif first:
        yield from _csv_rows(first, stream, position, name, check)


def _json_rows(first: str, stream: IO[str], position: int) -> Iterator[Row]:
    text = first
    while text:
        if text.strip():
            try:
                value = load_json(text, pairs=_with_each_key_once)
            except ValueError as error:
                yield position, f"expected one JSON object on the line ({str(error)[:80]})"
            else:
                if isinstance(value, dict):
                    yield position, value
                else:
                    yield position, f"expected a JSON object, got {type(value).__name__}"
        position, text = position + 1, stream.readline()


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [normalise(key) for key, _ in pairs]
    twice = _twice(keys)
    if twice is not None:
        raise ValueError(f"{twice!r} is there twice")
    return dict(zip(keys, (value for _, value in pairs), strict=True))


def _twice(names: list[str]) -> str | None:
    """The first name that is there twice; columns without a name are nobody's."""
    seen: set[str] = set()
    for name in filter(None, names):
        if name in seen:
            return name
        seen.add(name)
    return None


def _csv_rows(
    header: str, stream: IO[str], position: int, name: str, check: Callable[[list[str], str], None]
) -> Iterator[Row]:
    try:
        columns = [normalise(column) for column in next(csv.reader([header]))]
    except csv.Error as error:
        raise TraceError(f"{name}:{position}: expected the names of columns ({error})") from None
    twice = _twice(columns)
    if twice is not None:
        raise TraceError(f"{name}:{position}: two columns are called {twice!r}; rename one, as only one can be read")
    check(columns, f"{name}:{position}")
    reader = csv.reader(stream)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield position + reader.line_num, f"expected a CSV row ({error})"
            continue
        if not cells:
            continue
        if len(cells) != len(columns):
            yield position + reader.line_num, f"expected {len(columns)} columns as in the header, got {len(cells)}"
        else:
            yield position + reader.line_num, dict(zip(columns, cells, strict=True))


def _with_arrivals(
    requests: list[TraceRequest], name: str, rate_rps: float | None, seed: int
) -> tuple[list[TraceRequest], str]:
    if rate_rps is None:
        raise TraceError(f"{name}: has lengths but no arrival times; give a rate (requests per second) to make them")
    envelope = Envelope.constant(rate_rps, 2.0 * len(requests) / rate_rps + 60.0 / rate_rps)
    times = arrivals(envelope, 1.0, np.random.default_rng(seed))[: len(requests)]
    kept = [replace(request, arrival_s=float(time)) for time, request in zip(times, requests, strict=False)]
    return kept, f"no arrival times in the file: Poisson arrivals at {rate_rps:g} requests/s, seed {seed}"
