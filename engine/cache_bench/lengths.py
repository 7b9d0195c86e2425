"""Prompt and output lengths of a realistic load: a trace's where there is one, else drawn from stated distributions."""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Fitted to quantiles of the Azure 2023 conversation trace: prompts 1,020 tokens at the median and 4,142 at p99, outputs
# 129 and 601.
PROMPT_MEDIAN, PROMPT_SIGMA = 1020, 0.60
OUTPUT_MEDIAN, OUTPUT_SIGMA = 129, 0.66
_COLUMNS = (("prompt_tokens", "output_tokens"), ("contexttokens", "generatedtokens"))


@dataclass(frozen=True)
class Lengths:
    """``pairs``: (prompt tokens, output tokens) of requests in order, each at least 1. ``source``: where from."""

    source: str
    pairs: tuple[tuple[int, int], ...]


def load_lengths(
    traces: Path | None, count: int, rng: random.Random, *, longest: int, divide_by: float = 1.0
) -> Lengths:
    """``count`` requests, lengths divided and then cut so that prompt and output together stay within ``longest``.

    ``traces``: folder with CSV files, plain or gzip, of which a chat trace with the columns of the Azure traces is
    taken, from a random row on; without one, independent lognormal lengths.
    """
    path, rows = _find(traces) if traces is not None else (None, [])
    if path is not None:
        start = rng.randrange(len(rows))
        raw = [rows[(start + i) % len(rows)] for i in range(count)]
        source = f"{path.name} from row {start}"
    else:
        raw = [
            (
                PROMPT_MEDIAN * math.exp(rng.gauss(0, PROMPT_SIGMA)),
                OUTPUT_MEDIAN * math.exp(rng.gauss(0, OUTPUT_SIGMA)),
            )
            for _ in range(count)
        ]
        source = (
            f"lognormal: prompt median {PROMPT_MEDIAN}, sigma {PROMPT_SIGMA}; "
            f"output median {OUTPUT_MEDIAN}, sigma {OUTPUT_SIGMA}"
        )
    if divide_by != 1:
        source += f"; divided by {divide_by:g}"
    return Lengths(source, tuple(_cut(prompt / divide_by, output / divide_by, longest) for prompt, output in raw))


def _cut(prompt: float, output: float, longest: int) -> tuple[int, int]:
    new = min(max(1, round(output)), longest - 1)
    return min(max(1, round(prompt)), longest - new), new


def _find(folder: Path) -> tuple[Path | None, list[tuple[float, float]]]:
    """The first file with lengths, chats before others."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".csv", ".csv.gz")))
    for path in sorted(files, key=lambda path: "conv" not in path.name.lower()):
        rows = list(_rows(path))
        if rows:
            return path, rows
    return None, []


def _rows(path: Path) -> Iterator[tuple[float, float]]:
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as stream:
        reader = csv.reader(stream)
        header = [name.strip().lower() for name in next(reader, [])]
        for prompt, output in _COLUMNS:
            if prompt in header and output in header:
                columns = header.index(prompt), header.index(output)
                yield from ((float(row[columns[0]]), float(row[columns[1]])) for row in reader if row)
