"""Read a trace file: CSV or JSON lines, plain or gzip, whatever its ending says. Stdlib only."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from envs.workload.arrivals import Envelope, arrivals
from envs.workload.forms import detect, normalise
from envs.workload.trace import Trace, TraceError, TraceRequest, from_requests

GZIP_MAGIC = b"\x1f\x8b"
Row = tuple[int, dict[str, Any] | str]  # line number, and the row or why it cannot be read


def load_trace(path: Path, *, skip_bad_lines: bool = False, rate_rps: float | None = None, seed: int = 0) -> Trace:
    """The requests of a file in one of the forms of :mod:`envs.workload.forms`, told apart by header.

    ``rate_rps``: Poisson arrivals for a file that has lengths but no arrival times. ``skip_bad_lines`` counts broken
    lines instead of refusing them. Raises TraceError with ``file:line`` and what was expected.
    """
    requests: list[TraceRequest] = []
    skipped, first_skipped, form = 0, "", None
    try:
        with _open(path) as stream:
            for line, row in _rows(stream, path.name):
                try:
                    if isinstance(row, str):
                        raise ValueError(row)  # noqa: TRY301, TRY004 (same handling as a field that cannot be read)
                    if form is None:
                        form = detect(row, f"{path.name}:{line}")
                    requests.append(form.read(row))
                except ValueError as error:
                    problem = str(error) if isinstance(error, TraceError) else f"{path.name}:{line}: {error}"
                    if not skip_bad_lines:
                        raise TraceError(problem) from None
                    skipped, first_skipped = skipped + 1, first_skipped or problem
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TraceError(f"{path}: cannot be read: {reason}") from None
    if form is None or not requests:
        raise TraceError(f"{path.name}: no requests in it{f' (first bad line: {first_skipped})' if skipped else ''}")
    notes = [f"{skipped} broken lines skipped, the first: {first_skipped}"] if skipped else []
    if form.arrival is None:
        requests, note = _with_arrivals(requests, path.name, rate_rps, seed)
        notes.append(note)
    block = form.block_tokens
    return from_requests(path.name, requests, block_tokens=block, notes=tuple(notes), skipped_lines=skipped)


def _open(path: Path) -> IO[str]:
    raw = path.open("rb")
    magic = raw.read(2)
    raw.seek(0)
    binary: Any = gzip.GzipFile(fileobj=raw) if magic == GZIP_MAGIC else raw
    return io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")


def _rows(stream: IO[str], name: str) -> Iterator[Row]:
    """Rows with their line numbers; the first non-blank character says JSON lines or CSV."""
    position = 1
    first = stream.readline()
    while first and not first.strip():
        position, first = position + 1, stream.readline()
    if first.lstrip().startswith("{"):
        yield from _json_rows(first, stream, position)
    elif first:
        yield from _csv_rows(first, stream, position, name)


def _json_rows(first: str, stream: IO[str], position: int) -> Iterator[Row]:
    text = first
    while text:
        if text.strip():
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                yield position, f"expected one JSON object on the line ({str(error)[:80]})"
            else:
                if isinstance(value, dict):
                    yield position, {normalise(str(key)): item for key, item in value.items()}
                else:
                    yield position, f"expected a JSON object, got {type(value).__name__}"
        position, text = position + 1, stream.readline()


def _csv_rows(header: str, stream: IO[str], position: int, name: str) -> Iterator[Row]:
    columns = [normalise(column) for column in next(csv.reader([header]))]
    detect(columns, f"{name}:{position}")  # a header alone is enough to refuse an unknown form
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
    kept = [
        TraceRequest(float(t), r.prompt_tokens, r.output_tokens, r.hash_ids)
        for t, r in zip(times, requests, strict=False)
    ]
    return kept, f"no arrival times in the file: Poisson arrivals at {rate_rps:g} requests/s, seed {seed}"
