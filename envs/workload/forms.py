"""The public trace forms: which columns tell them apart, and how a row of each is read. Stdlib only.

Azure LLM inference traces (2023, 2024): ``TIMESTAMP,ContextTokens,GeneratedTokens``. BurstGPT: ``Timestamp,Model,
Request tokens,Response tokens,Total tokens,Log Type``. Mooncake: JSON lines with ``timestamp`` in ms, ``input_length``,
``output_length``, ``hash_ids`` of 512-token blocks. Plain: ``arrival_s,prompt_tokens,output_tokens`` with optional
``hash_ids_b<N>`` (blocks of N tokens) or ``hash_ids_b<N>bytes``, and an optional ``source``, ``session`` or ``client``.
Recordings of one's own traffic (``autotune engine --record``) are plain. Any other table: :func:`chosen`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from envs.workload.trace import TraceError, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
BYTES_PER_TOKEN = 4  # the estimate that traces given in bytes make themselves
MAX_ARRIVAL_S = 9e9  # what nanoseconds in 64 bits can count; as a date the year 2255
MAX_TOKENS = 100_000_000  # beyond any context: a damaged number, not a length

ROLES = ("arrival", "prompt", "output", "hashes", "source")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SOURCES = ("source", "session", "client")

T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """How to read one kind of row: column names and the meaning of the arrival column (None: it has none)."""

    name: str
    prompt: str
    output: str
    arrival: str | None
    read_arrival: Callable[[Any], float]
    arrival_unit: str
    hash_ids: str | None = None
    block_tokens: float = 0.0
    source: str | None = None

    def read(self, row: Mapping[str, Any]) -> TraceRequest:
        """The request of one row. Raises ValueError saying which column was expected to hold what.

        Token counts of 0 (failed requests in some traces) are read as 1: an empty prompt or output cannot be sent.
        """
        arrival_s = 0.0
        if self.arrival is not None:
            arrival_s = self._field(row, self.arrival, self._arrival_s, self.arrival_unit)
        hash_ids: tuple[int, ...] = ()
        if self.hash_ids is not None:
            hash_ids = self._field(row, self.hash_ids, _hash_ids, "whole numbers")
        return TraceRequest(
            arrival_s,
            max(1, self._field(row, self.prompt, _tokens, "a number of tokens")),
            max(1, self._field(row, self.output, _tokens, "a number of tokens")),
            hash_ids,
            sys.intern(str(row.get(self.source) or "").strip()) if self.source is not None else "",
        )

    def _arrival_s(self, value: Any) -> float:
        seconds = self.read_arrival(value)
        if abs(seconds) > MAX_ARRIVAL_S:
            raise ValueError("beyond any clock")
        return seconds

    @staticmethod
    def _field(row: Mapping[str, Any], column: str, read: Callable[[Any], T], expected: str) -> T:
        value = row.get(column)
        try:
            return read(value)
        except (ValueError, TypeError, OverflowError):
            got = "nothing" if value is None else repr(value)[:60]
            raise ValueError(f"expected {expected} in {column!r}, got {got}") from None


def detect(columns: Iterable[str], name: str) -> Form:
    """The form with these columns (case and surrounding blanks ignored; pass rows with :func:`normalise` keys).

    Raises TraceError, listing the known forms.
    """
    known = {normalise(column) for column in columns}
    if {"timestamp", "contexttokens", "generatedtokens"} <= known:
        return Form("azure", "contexttokens", "generatedtokens", "timestamp", timestamp_s, "a date and time")
    if {"timestamp", "request tokens", "response tokens"} <= known:
        source = "model" if "model" in known else None
        return Form("burstgpt", "request tokens", "response tokens", "timestamp", _seconds, "seconds", source=source)
    if {"timestamp", "input_length", "output_length"} <= known:
        ids = "hash_ids" if "hash_ids" in known else None
        block = MOONCAKE_BLOCK_TOKENS if ids else 0
        return Form("mooncake", "input_length", "output_length", "timestamp", _milliseconds, "milliseconds", ids, block)
    for suffix in ("", "_est"):
        prompt, output = f"prompt_tokens{suffix}", f"output_tokens{suffix}"
        if {prompt, output} <= known:
            ids, tokens = _hash_column(known)
            arrival = "arrival_s" if "arrival_s" in known else None
            source = next((column for column in _SOURCES if column in known), None)
            return Form("plain", prompt, output, arrival, _seconds, "seconds", ids, tokens, source)
    raise TraceError(
        f"{name}: columns not recognised ({', '.join(sorted(known)[:6]) or 'none'}); expected one of: "
        "TIMESTAMP,ContextTokens,GeneratedTokens (Azure) · Timestamp,Request tokens,Response tokens (BurstGPT) · "
        "timestamp,input_length,output_length[,hash_ids] (Mooncake) · arrival_s,prompt_tokens,output_tokens"
    )


def chosen(columns: Mapping[str, str], *, unit: str = "s", block_tokens: float = 0.0) -> Form:
    """The form of a table whose columns a person names: role (one of ROLES) to column.

    ``arrival`` holds numbers of ``unit`` or dates and times; without it arrivals are made. ``hashes`` holds ids of
    blocks of ``block_tokens`` tokens. Raises ValueError in one line.
    """
    unknown = sorted(set(columns) - set(ROLES))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a column that a trace has; choose from {', '.join(ROLES)}")
    missing = [role for role in ("prompt", "output") if role not in columns]
    if missing:
        raise ValueError(f"say which column holds the {missing[0]} tokens: {missing[0]}=COLUMN")
    if unit not in UNITS:
        raise ValueError(f"{unit!r} is no unit of time here; choose one of {', '.join(UNITS)}")
    if ("hashes" in columns) != (block_tokens > 0):
        raise ValueError("block hashes and the number of tokens in a block go together")
    if "hashes" in columns and not 1 / BYTES_PER_TOKEN <= block_tokens <= MAX_TOKENS:
        raise ValueError(f"blocks hold from 1 byte, {1 / BYTES_PER_TOKEN:g} tokens, to {MAX_TOKENS} tokens")
    factor = UNITS[unit]

    def read_arrival(value: Any) -> float:
        try:
            return finite(value) * factor
        except ValueError:
            return timestamp_s(value)

    named = {role: normalise(column) for role, column in columns.items()}
    return Form(
        "chosen",
        named["prompt"],
        named["output"],
        named.get("arrival"),
        read_arrival,
        f"a number of {unit} or a date and time",
        named.get("hashes"),
        block_tokens,
        named.get("source"),
    )


def normalise(column: str) -> str:
    return column.strip().removeprefix("\ufeff").strip().lower()


def _hash_column(columns: Iterable[str]) -> tuple[str | None, float]:
    for column in sorted(columns):
        match = re.fullmatch(r"hash_ids_b([1-9]\d{0,6})(bytes)?", column)
        if match:
            size = int(match.group(1))
            return column, size / BYTES_PER_TOKEN if match.group(2) else float(size)
    return None, 0.0


def finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError("not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _seconds(value: Any) -> float:
    return finite(value)


def _milliseconds(value: Any) -> float:
    return finite(value) / 1e3


def timestamp_s(value: Any) -> float:
    """Seconds since the epoch of an ISO date and time; without a zone it is taken as UTC: differences count."""
    moment = datetime.fromisoformat(str(value).strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(value: Any) -> int:
    number = finite(value)
    if number < 0 or number > MAX_TOKENS or number != int(number):
        raise ValueError("not a count")
    return int(number)


def _hash_ids(value: Any) -> tuple[int, ...]:
    parts = value.split() if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise TypeError("not a list")
    ids = tuple(int(part) for part in parts if not isinstance(part, bool | float))
    if len(ids) != len(parts):
        raise ValueError("not whole numbers")
    return ids
