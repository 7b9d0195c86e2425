"""What a step consists of, counted: the figures that a latency model puts a price on. No torch.

A *token-layer* is one token in one layer of the model, so that layer groups of different windows add up. Counts are
integers and exact: the same plan over the same block tables gives the same counts in the engine and in a simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from engine.block_table import BlockTable
from engine.formats import FORMATS, NATIVE
from engine.memory_model import GroupSpec
from engine.plan import RecodeBatch, ScheduledSequence
from engine.request import Request, RequestStatus
from kernels.layout import JOB_DST_FORMAT, JOB_SRC_FORMAT


@dataclass(frozen=True)
class Term:
    """One part of a step's time: ``unit`` is what a count of 1 stands for."""

    name: str
    unit: str
    description: str


_KV = tuple(
    Term(f"decode_kv_{kind.name}", "token-layer", f"KV stored as {kind.name} that decoding sequences attend")
    for kind in FORMATS
)
STEP_TERMS: Final[tuple[Term, ...]] = (
    Term("step", "step", "what every step costs: launches, weights read once, bookkeeping"),
    Term("prefill_token", "token", "tokens of prompt chunks through the model"),
    Term("decode_sequence", "sequence", "sequences that compute a single token"),
    Term("token_beyond_knee", "token", "tokens beyond the knee, where the step is no longer bound by reading weights"),
    Term("prefill_sequence", "sequence", "prompt chunks, whatever their length"),
    Term("prefill_pair", "pair-layer", "pairs of a prompt token and a token that it attends"),
    Term("prefill_kv_native", "token-layer", "native KV gathered for a prompt chunk, once each"),
    Term("prefill_kv_lossy", "token-layer", "quantised KV gathered for a prompt chunk, once each"),
    *_KV,
    Term("decode_block", "block-layer", "table entries that decoding sequences walk: the price of small blocks"),
    Term("sample", "sequence", "sequences that sample a token"),
    Term("chunk_step", "step", "steps with a prompt chunk: a second kind of attention, products of many rows"),
    Term("regrouped", "step", "decode steps over other sequences than the step before, or after chunks: new tables"),
    Term(
        "after_chunk",
        "token",
        "tokens of the last step's chunks, up to 512: how cold a decode step's caches are",
    ),
    Term(
        "decode_kv_cold",
        "token-layer",
        "KV that decoding sequences attend in a step with a chunk, on top of its price by format",
    ),
)
STEP_NAMES: Final = tuple(term.name for term in STEP_TERMS)
STEP_INDEX: Final[Mapping[str, int]] = {name: index for index, name in enumerate(STEP_NAMES)}

RECODES: Final = tuple(
    (source.name, target.name) for source in FORMATS for target in FORMATS if target.lossiness >= source.lossiness
)
RECODE_TERMS: Final[tuple[Term, ...]] = (
    Term("recode", "batch", "conversions of one layer group in one step, whatever their number"),
    *(
        Term(f"recode_{source}_{target}", "token-layer", f"KV converted from {source} to {target}")
        for source, target in RECODES
    ),
)
RECODE_NAMES: Final = tuple(term.name for term in RECODE_TERMS)
RECODE_INDEX: Final[Mapping[str, int]] = {name: index for index, name in enumerate(RECODE_NAMES)}
ALL_TERMS: Final = (*STEP_TERMS, *RECODE_TERMS)


class Tables(Protocol):
    """The part of the cache manager that is counted."""

    def table(self, request: Request, group: int) -> BlockTable:
        """The block table of a request in one layer group."""
        ...


@dataclass(slots=True)
class Stored:
    """One sequence's KV in one group: tokens by format code in all entries but the last, and where that one begins."""

    version: int = 0
    num_entries: int = 0
    tokens: list[int] = field(default_factory=lambda: [0] * len(FORMATS))
    last_first: int = 0
    last_code: int = 0
    is_native: bool = True

    def refresh(self, table: BlockTable) -> None:
        """Bring the counts up to a newer version of the table; constant time when nothing happened but appends."""
        start = self.num_entries - 1
        if start < 0 or table.first_changed(self.version) < start:
            start = 0
            self.tokens = [0] * len(FORMATS)
        blocks, stops, tokens = table.blocks, table.stops, self.tokens
        self.num_entries = len(blocks)
        for index in range(start, len(blocks) - 1):
            block = blocks[index]
            tokens[block.block_class.format.code] += stops[index] - block.first
        last = blocks[-1]
        self.last_first, self.last_code = last.first, last.block_class.format.code
        self.is_native = self.last_code == NATIVE.code and not any(tokens[1:])
        self.version = table.version


class StepCounter:
    """Counts plans. Keeps what it knows of a request's tables while the request runs.

    ``kv_bytes_read``/``kv_bytes_written``: of the last step counted, as :class:`engine.runner.StepWork` has them.
    """

    def __init__(self, groups: Sequence[GroupSpec], *, knee_tokens: int = 1) -> None:
        self.knee_tokens = knee_tokens
        self.kv_bytes_read = 0
        self.kv_bytes_written = 0
        self.layers = [len(group.layers) for group in groups]
        self.windows = [group.window for group in groups]
        self.token_bytes = [[group.shape.tile_stride(kind) // kind.tile_tokens for kind in FORMATS] for group in groups]
        self.native_bytes = sum(by_code[NATIVE.code] for by_code in self.token_bytes)  # of a token, all layers
        self._stored: dict[Request, list[Stored]] = {}
        self._decoded: Sequence[Request] = ()  # by the last step; nobody where it had chunks
        self._chunk_tokens = 0  # of the last step

    def stored(self, request: Request, tables: Tables) -> list[Stored]:
        """A request's KV by group, up to date."""
        found = self._stored.get(request)
        if found is None:
            found = self._stored[request] = [Stored() for _ in self.layers]
        for group, stored in enumerate(found):
            table = tables.table(request, group)
            if table.version != stored.version:
                stored.refresh(table)
        return found

    def step(self, sequences: Sequence[ScheduledSequence], tables: Tables) -> list[int]:
        """Counts in the order of ``STEP_TERMS``. Sequences of one token decode, whatever the reason for having one."""
        if len(self._stored) > 2 * len(sequences) + 64:
            self._stored = {r: s for r, s in self._stored.items() if r.status is RequestStatus.RUNNING}
        counts = [0] * len(STEP_TERMS)
        self.kv_bytes_read = tokens = singles = chunks = samples = 0
        for sequence in sequences:
            num_tokens = sequence.num_tokens
            tokens += num_tokens
            samples += sequence.samples
            if num_tokens == 1:
                singles += 1
                self.add_decode(sequence.request, sequence.start, tables, counts)
            else:
                chunks += 1
                self._add_chunk(sequence, tables, counts)
        counts[_STEP] = 1
        counts[_PREFILL_TOKEN] = tokens - singles
        counts[_DECODE_SEQUENCE] = singles
        counts[_BEYOND_KNEE] = max(0, tokens - self.knee_tokens)
        counts[_PREFILL_SEQUENCE] = chunks
        counts[_SAMPLE] = samples
        if chunks:
            counts[_CHUNK_STEP], self._decoded, self._chunk_tokens = 1, (), tokens - singles
            counts[_DECODE_KV_COLD] = sum(counts[_DECODE_KV : _DECODE_KV + len(FORMATS)])
        else:
            counts[_REGROUPED], counts[_AFTER_CHUNK] = self.decoded_next([sequence.request for sequence in sequences])
        self.kv_bytes_written = tokens * self.native_bytes
        return counts

    def decoded_next(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Counts of ``regrouped`` and ``after_chunk`` when these decode next. A step over nobody is neither."""
        changed, tokens = requests != self._decoded, min(self._chunk_tokens, _COLD_TOKENS)
        self._decoded, self._chunk_tokens = requests, 0
        return (int(changed), tokens) if requests else (0, 0)

    def counted(self, request: Request) -> list[Stored]:
        """A request's KV by group as the last step counted found it."""
        return self._stored[request]

    def add_decode(self, request: Request, position: int, tables: Tables, counts: list[int]) -> None:
        """Add what the token at ``position`` attends, itself included."""
        for group, stored in enumerate(self.stored(request, tables)):
            layers, token_bytes = self.layers[group], self.token_bytes[group]
            if stored.is_native and self.windows[group] is None:
                num_tokens = stored.tokens[NATIVE.code] + position + 1 - stored.last_first
                counts[_DECODE_KV] += layers * num_tokens
                counts[_DECODE_BLOCK] += layers * stored.num_entries
                self.kv_bytes_read += token_bytes[NATIVE.code] * num_tokens
                continue
            for code, num_tokens in enumerate(self._attended(request, position, group, stored, tables)):
                if num_tokens:
                    counts[_DECODE_KV + code] += layers * num_tokens
                    self.kv_bytes_read += token_bytes[code] * num_tokens
            counts[_DECODE_BLOCK] += layers * stored.num_entries

    def _add_chunk(self, sequence: ScheduledSequence, tables: Tables, counts: list[int]) -> None:
        request, num_tokens = sequence.request, sequence.num_tokens
        for group, stored in enumerate(self.stored(request, tables)):
            layers, token_bytes, window = self.layers[group], self.token_bytes[group], self.windows[group]
            last = sequence.start + num_tokens - 1
            attended = self._attended(request, last, group, stored, tables, first_query=sequence.start)
            for code, tokens in enumerate(attended):
                self.kv_bytes_read += token_bytes[code] * tokens
            total = sum(attended)
            counts[_PREFILL_KV_NATIVE] += layers * attended[NATIVE.code]
            counts[_PREFILL_KV_LOSSY] += layers * (total - attended[NATIVE.code])
            before = total - num_tokens
            counts[_PREFILL_PAIR] += layers * _pairs(before, num_tokens, window)

    def _attended(
        self,
        request: Request,
        position: int,
        group: int,
        stored: Stored,
        tables: Tables,
        first_query: int | None = None,
    ) -> list[int]:
        """Tokens by format code up to ``position``, without those that the model's own window hides."""
        tokens = stored.tokens.copy()
        tokens[stored.last_code] += position + 1 - stored.last_first
        window = self.windows[group]
        if window is None:
            return tokens
        hidden_below = (position if first_query is None else first_query) - window + 1
        if hidden_below > 0:
            table = tables.table(request, group)
            for block, stop in zip(table.blocks, table.stops, strict=True):
                if block.first >= hidden_below:
                    break
                tokens[block.block_class.format.code] -= min(stop, hidden_below) - block.first
        return tokens

    def recode(self, batches: Sequence[RecodeBatch]) -> list[int]:
        """Counts of a step's conversions in the order of ``RECODE_TERMS``."""
        counts = [0] * len(RECODE_TERMS)
        for batch in batches:
            if batch.jobs:
                counts[0] += 1
                layers = self.layers[batch.group]
                for job in batch.jobs:
                    target = job[JOB_DST_FORMAT]
                    counts[_RECODE_OF[job[JOB_SRC_FORMAT], target]] += layers * FORMATS[target].tile_tokens
        return counts


def _pairs(before: int, num_tokens: int, window: int | None) -> int:
    """Pairs of a query and a key that it attends: token i of a chunk attends ``before + i + 1`` or its window."""
    if window is None or before + num_tokens <= window:
        return num_tokens * before + num_tokens * (num_tokens + 1) // 2
    growing = max(0, window - before)  # queries whose window is not full yet
    return growing * before + growing * (growing + 1) // 2 + (num_tokens - growing) * window


_STEP, _PREFILL_TOKEN, _DECODE_SEQUENCE, _BEYOND_KNEE, _PREFILL_SEQUENCE, _PREFILL_PAIR = (
    STEP_INDEX[name]
    for name in (
        "step", "prefill_token", "decode_sequence", "token_beyond_knee", "prefill_sequence", "prefill_pair",
    )
)  # fmt: skip
_PREFILL_KV_NATIVE, _PREFILL_KV_LOSSY = STEP_INDEX["prefill_kv_native"], STEP_INDEX["prefill_kv_lossy"]
_DECODE_KV = STEP_INDEX[f"decode_kv_{FORMATS[0].name}"]  # + format code
_DECODE_BLOCK, _SAMPLE = STEP_INDEX["decode_block"], STEP_INDEX["sample"]
_CHUNK_STEP, _REGROUPED = STEP_INDEX["chunk_step"], STEP_INDEX["regrouped"]
# What a chunk brings in pushes out what decoding had there; beyond so many tokens nothing is left to push out.
_COLD_TOKENS: Final = 512
_AFTER_CHUNK, _DECODE_KV_COLD = STEP_INDEX["after_chunk"], STEP_INDEX["decode_kv_cold"]
_RECODE_OF = {
    (source.code, target.code): RECODE_INDEX[f"recode_{source.name}_{target.name}"]
    for source in FORMATS
    for target in FORMATS
    if target.lossiness >= source.lossiness
}
