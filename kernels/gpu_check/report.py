"""What `make gpu-check` leaves behind: a line per row as it is measured, then a table and one JSON line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass
class Journal:
    """Rows so far, in a file of JSON lines whose first is the header: card, versions, digest of the sources.

    A file with another header is replaced: its rows were measured by something else.
    """

    path: Path
    header: Row
    rows: dict[str, Row] = field(default_factory=dict)

    def open(self) -> None:
        """Read the rows of an earlier, unfinished run of the same, or start anew."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        read = []
        for line in lines:
            try:
                read.append(json.loads(line))
            except ValueError:
                break  # cut off while it was written
        if read and read[0] == self.header:
            self.rows = {row["key"]: row for row in read[1:]}
        written = [self.header, *self.rows.values()]
        part = self.path.with_name(f".{self.path.name}.part")  # what was measured is there all the time
        part.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
        part.replace(self.path)

    def add(self, key: str, row: Row) -> None:
        """Append a row and flush it, so that nothing measured is lost to whatever comes next."""
        self.rows[key] = {"key": key, **row}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[key]) + "\n")


def summary(rows: Sequence[Row]) -> Row:
    """The promised figures. None: the rows that it takes were not measured.

    ``*_share``: least share of the copy bandwidth at batch >= 16, context >= 8,192 and blocks >= 64;
    ``int4_speedup_32k``: least ratio of native's to int4's time at 32,768 tokens, same block size and batch.
    """
    decode = [row for row in rows if row.get("call") == "decode" and "us" in row]
    result: Row = {}
    for kv_format in dict.fromkeys(row["format"] for row in decode):
        large = [
            row["share_of_copy"]
            for row in decode
            if row["format"] == kv_format and row["batch"] >= 16 and row["context"] >= 8192 and row["block_size"] >= 64
        ]
        result[f"{kv_format}_share"] = min(large, default=None)
    times = {(row["format"], row["block_size"], row["batch"]): row["us"] for row in decode if row["context"] == 32768}
    ratios = [
        micros / times["int4", *place] for (name, *place), micros in times.items()
        if name == "native" and ("int4", *place) in times
    ]  # fmt: skip
    result["int4_speedup_32k"] = round(min(ratios), 2) if ratios else None
    return result


def table(header: Row, rows: Sequence[Row], figures: Row) -> str:
    """Markdown: what it ran on, the promised figures, one table per kind of call."""
    lines = [f"# Kernels on {header['device']}", ""]
    lines += [f"- {name}: {value}" for name, value in header.items()]
    lines += [f"- {name}: {value}" for name, value in figures.items()]
    for call in dict.fromkeys(row["call"] for row in rows if "call" in row):
        chosen = [row for row in rows if row.get("call") == call]
        columns = list(dict.fromkeys(name for row in chosen for name in row if name not in {"key", "call"}))
        lines += ["", f"## {call}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(str(row.get(name, '')) for name in columns)} |" for row in chosen]
    return "\n".join(lines) + "\n"
