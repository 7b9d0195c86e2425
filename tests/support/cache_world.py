"""A cache, a scheduler, and an executor that moves real bytes, so that tests see where every token's KV lies.

A token's KV is stood for by two 32-bit words in the bytes that the layout gives its key and its value: a hash of its
whole prefix, and the *taint*, the lossiest format that it was stored in or computed over. Tiles are filled with junk
before they are written, so any overlap shows.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.attention_mass import ObservedMass
from engine.cache_manager import CacheManager
from engine.clock import ManualClock
from engine.events import ListSink
from engine.formats import lossiness_of
from engine.memory_model import GroupSpec
from engine.plan import RecodeBatch, ScheduledSequence, SequenceOutput, StepPlan
from engine.pool_block import DEVICE
from engine.request import CachePolicy, Request, RequestStatus, SamplingParams
from engine.scheduler import Scheduler
from engine.stats import Counters
from engine.transfers import Direction, HostLink, Transfer
from engine.tunables import default_values
from kernels.layout import FORMATS, NATIVE, KVFormat, KVShape

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, element_bytes=2)
SLAB_BYTES = SHAPE.block_bytes(NATIVE, 256)
JUNK = 0xEE


def prefix_hashes(ids: list[int], salt: str = "") -> list[int]:
    """One 32-bit hash per token, of everything up to it."""
    value, hashes = zlib.crc32(salt.encode()), []
    for token in ids:
        value = zlib.crc32(token.to_bytes(4, "little", signed=True), value)
        hashes.append(value)
    return hashes


class Bytes:
    """One group's arena."""

    def __init__(self, num_bytes: int, shape: KVShape) -> None:
        self.data = np.full(num_bytes, JUNK, np.uint8)
        self.words = self.data.view(np.uint32)
        self.shape = shape
        self.places = {kind.code: self._places(kind) for kind in FORMATS}

    def _places(self, kind: KVFormat) -> npt.NDArray[np.int64]:
        """[256, 2]: where a block's tokens have their two words, in words from the block's start."""
        layout = self.shape.head_layout(kind)
        bits = 8 * self.shape.element_bytes
        tile, token = np.divmod(np.arange(256), kind.tile_tokens)
        base = tile * self.shape.tile_stride(kind)
        k = base + layout.k + token * (self.shape.head_dim * (kind.bits_k or bits) // 8)
        v = base + layout.v + token * (self.shape.head_dim * (kind.bits_v or bits) // 8)
        return np.stack([k, v], axis=1) // 4

    def read(self, kind: KVFormat, offset: int, first: int, count: int) -> npt.NDArray[np.uint32]:
        """[count, 2]: prefix hash and taint of tokens ``first ..`` of the block at ``offset``."""
        return self.words[offset * 64 + self.places[kind.code][first : first + count]]

    def write(self, kind: KVFormat, offset: int, first: int, values: npt.ArrayLike) -> None:
        values = np.asarray(values, np.uint32)
        self.words[offset * 64 + self.places[kind.code][first : first + len(values)]] = values

    def recode(self, batch: RecodeBatch) -> None:
        for dst_format, dst_offset, dst_tile, src_format, src_offset, src_tile, second, second_tile in batch.jobs:
            target, source = FORMATS[dst_format], FORMATS[src_format]
            count = source.tile_tokens
            assert target.lossiness >= source.lossiness, "recoding went back to a less lossy format"
            values = self.read(source, src_offset, src_tile * count, count)
            if count < target.tile_tokens:
                assert second >= 0
                values = np.concatenate([values, self.read(source, second, second_tile * count, count)])
            else:
                assert second == second_tile == -1
            start = dst_offset * 256 + dst_tile * self.shape.tile_stride(target)
            self.data[start : start + self.shape.tile_stride(target)] = JUNK
            taint = np.maximum(np.where(values[:, 1] <= 3, values[:, 1], 0), target.lossiness)
            self.write(target, dst_offset, dst_tile * target.tile_tokens, np.stack([values[:, 0], taint], axis=1))


class LateCopier:
    """Copies between arenas that are made only when they are reported: whatever was reused too early is lost.

    Targets hold junk until then. Each direction keeps its order; a copy takes up to ``lag`` steps.
    """

    def __init__(self, device: list[Bytes], host: list[Bytes], lag: int, seed: int) -> None:
        self.tiers = {Direction.OUT: (device, host), Direction.IN: (host, device)}
        self.lag = lag
        self.random = random.Random(seed)
        self.pending: list[tuple[int, Transfer]] = []  # steps still to wait

    def submit(self, transfers: tuple[Transfer, ...]) -> None:
        for transfer in transfers:
            target = self.tiers[transfer.direction][1][transfer.group]
            for _, start, count in transfer.rows:
                target.data[start : start + count] = JUNK
            self.pending.append((self.random.randint(0, self.lag), transfer))

    def arrived(self) -> list[int]:
        """One step later: make and report what is due."""
        done, waiting = [], []
        blocked: set[Direction] = set()
        for steps, transfer in self.pending:
            if steps > 0 or transfer.direction in blocked:
                waiting.append((steps - 1, transfer))
                blocked.add(transfer.direction)
                continue
            sources, targets = (arenas[transfer.group] for arenas in self.tiers[transfer.direction])
            for start, to, count in transfer.rows:
                targets.data[to : to + count] = sources.data[start : start + count]
            done.append(transfer.number)
        self.pending = waiting
        return done


@dataclass
class World:
    """Everything needed to run steps; ``groups`` windows default to one full-attention group."""

    num_slabs: int = 8
    windows: tuple[int | None, ...] = (None,)
    lossiest: tuple[str | None, ...] = ()
    reports_attention: bool = True
    shape: KVShape = SHAPE
    values: dict[str, Any] = field(default_factory=dict)
    recent_tokens: int = 32
    sinks: int = 16
    watermark: float = 0.0
    max_model_len: int = 4096
    max_waiting: int = 1000
    recode_tokens: int = 256
    sync: bool = False
    seed: int = 0
    eos: frozenset[int] = frozenset()
    host_slabs: int = 0
    link_bytes_per_s: float = 1e6  # a native token is 32 bytes, a step 10 ms
    lag: int = 3
    staging_slabs: int = 0  # without room for it nothing is streamed

    def __post_init__(self) -> None:
        self.values = {**default_values(), **self.values}
        self.clock = ManualClock()
        self.events = ListSink()
        self.counters = Counters()
        limits = self.lossiest or (None,) * len(self.windows)
        groups = [
            GroupSpec(f"g{i}", tuple(range(self.shape.num_layers)), self.shape, window, limit)
            for i, (window, limit) in enumerate(zip(self.windows, limits, strict=True))
        ]
        self.cache = CacheManager(
            groups,
            self.num_slabs * self.shape.block_bytes(NATIVE, 256) * len(groups),
            self.values,
            recent_tokens=self.recent_tokens,
            sinks=self.sinks,
            watermark=self.watermark,
            clock=self.clock,
            events=self.events,
            counters=self.counters,
            host_pool_bytes=self.host_slabs * SLAB_BYTES * len(groups),
            link=HostLink(self.link_bytes_per_s, self.link_bytes_per_s) if self.host_slabs else None,
            staging_bytes=self.staging_slabs * SLAB_BYTES * len(groups),
        )
        self.scheduler = Scheduler(
            self.cache,
            self.values,
            max_model_len=self.max_model_len,
            max_waiting=self.max_waiting,
            clock=self.clock,
            counters=self.counters,
            events=self.events,
            eos_token_ids=self.eos,
            recode_tokens_per_step=self.recode_tokens,
            sync_recode=self.sync,
        )
        self.arenas = [Bytes(self.cache.layout.arena_bytes(i), self.shape) for i in range(len(groups))]
        self.hosts = [Bytes(self.cache.group_host_bytes(i), self.shape) for i in range(len(groups))]
        self.copier = LateCopier(self.arenas, self.hosts, self.lag, self.seed)
        self.random = random.Random(self.seed)
        self.finished: list[Request] = []
        self.created = 0
        self.evictions: set[str] = set()
        self.apply()
        self._hashes: dict[str, npt.NDArray[np.uint32]] = {}

    # -- driving --------------------------------------------------------------------------------------------------

    def request(self, prompt: list[int], max_tokens: int = 8, **policy: Any) -> Request:
        logprobs = policy.pop("prompt_logprobs", None)
        self.created += 1
        self.clock.advance_s(0.001)
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=logprobs)
        return Request(f"r{self.created}", list(prompt), params, self.clock.now_ns(), cache=CachePolicy(**policy))

    def add(self, prompt: list[int], max_tokens: int = 8, **policy: Any) -> Request:
        request = self.request(prompt, max_tokens, **policy)
        self.scheduler.add(request)
        return request

    def apply(self, **changes: Any) -> None:
        self.values = {**self.values, **changes}
        self.evictions.add(self.values["eviction"])
        self.scheduler.apply(self.values)

    def run_plan(self, plan: StepPlan) -> list[SequenceOutput]:
        """The executor: recode, write, look at everything that attention would read, sample."""
        for batch in plan.recodes:
            self.arenas[batch.group].recode(batch)
        outputs = []
        for sequence in plan.sequences:
            request = sequence.request
            if request.status is not RequestStatus.RUNNING:
                continue
            self.write(request, sequence.start, sequence.num_tokens)
            token = self.random.randrange(3) if sequence.samples else None
            outputs.append(SequenceOutput(request, token, mass=self.attention(sequence)))
        return outputs

    def attention(self, sequence: ScheduledSequence) -> ObservedMass | None:
        """Made up, but a function of request and position alone: the same whatever the block size."""
        if not sequence.observed or not self.reports_attention:
            return None
        stop = sequence.start + sequence.num_tokens
        rows = []
        for group in range(len(self.arenas)):
            seed = zlib.crc32(f"{sequence.request.request_id} {stop} {group}".encode())
            row = np.random.default_rng(seed).random(-(-stop // 16)).astype(np.float32)
            rows.append(row / row.sum())
        return ObservedMass(sequence.observed, tuple(rows))

    def write(self, request: Request, start: int, num_tokens: int) -> None:
        """Write the KV of new tokens, computed over everything before them."""
        hashes = self.hashes(request)
        taint = max(self.read_all(request, group, start) for group in range(len(self.arenas)))
        for group, arena in enumerate(self.arenas):
            position = start
            copied = self.cache.host.pinned(group) if self.cache.host is not None else set()
            for offset, index, count in self.cache.slot_runs(request, start, num_tokens, group):
                assert (DEVICE, offset) not in copied, "written while it is being copied"
                arena.write(NATIVE, offset, index, [(hashes[position + i], taint) for i in range(count)])
                position += count
            assert position == start + num_tokens

    def step(self) -> StepPlan:
        self.cache.finish_transfers(self.copier.arrived())
        plan = self.scheduler.schedule()
        self.copier.submit(self.cache.plan_transfers())
        self.finished += self.scheduler.update(plan, self.run_plan(plan))
        self.clock.advance_s(0.01)
        return plan

    def settle(self, most: int = 2000) -> None:
        """Steps without requests until all copies are made that can be."""
        while self.copier.pending or self.cache.has_transfer_plans():
            assert most > 0, "no end of copying in sight"
            most -= 1
            self.step()

    def run(self, most: int = 10_000, check: bool = False) -> None:
        """Step until nothing is left to do. Fails when that takes more than ``most`` steps."""
        while self.scheduler.has_work:
            assert most > 0, "no end in sight"
            most -= 1
            self.step()
            if check:
                self.check()

    # -- going back -----------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """All that decides how it goes on: books, bytes, copies under way, chance and time."""
        return {
            "scheduler": self.scheduler.snapshot(),
            "bytes": [arena.data.copy() for arena in (*self.arenas, *self.hosts)],
            "pending": list(self.copier.pending),
            "chance": (self.random.getstate(), self.copier.random.getstate()),
            "time": self.clock.now_ns(),
            "finished": len(self.finished),
            "values": dict(self.values),
        }

    def go_back(self, saved: dict[str, Any]) -> None:
        """To what was saved, which stays usable. Events and counters go on, requests are others of the same name."""
        self.scheduler.restore(saved["scheduler"])
        for arena, data in zip((*self.arenas, *self.hosts), saved["bytes"], strict=True):
            arena.data[:] = data
        self.copier.pending = list(saved["pending"])
        self.random.setstate(saved["chance"][0])
        self.copier.random.setstate(saved["chance"][1])
        self.clock._now_ns = saved["time"]
        del self.finished[saved["finished"] :]
        self.values = dict(saved["values"])
        self._hashes.clear()

    def picture(self) -> dict[str, Any]:
        """What can be seen from outside, for comparison."""
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        return {
            "requests": [(request.status, request.request_id, list(request.all_ids)) for request in requests],
            "tables": [
                self.table(request, group)
                for request in requests
                if self.cache.holds(request)
                for group in range(len(self.arenas))
            ],
            "finished": [(request.request_id, list(request.output_ids)) for request in self.finished],
            "pins": self.cache.pins.to_json(),
            "usage": self.cache.usage(),
            "resident": self.cache.resident(),
            "converged": self.cache.converged_fraction(),
        }

    # -- looking --------------------------------------------------------------------------------------------------

    def read_all(self, request: Request, group: int, computed: int) -> int:
        """Check that every token before ``computed`` that should be attended is stored right; the worst taint."""
        hashes = self.hashes(request)
        window, worst = self.cache.groups[group].window, 0
        seen = np.zeros(computed, bool)
        floor = {"native": 0, "int8": 1, "k8v4": 2}.get(request.cache.kv_format_floor or "", 3)
        position = 0
        for entry in self.cache.entries(request, group):
            assert entry.first >= position
            assert entry.valid > 0
            position = entry.first + entry.valid
            kind = FORMATS[entry.format_code]
            assert kind.lossiness <= min(floor, lossiness_of(self.cache.groups[group].lossiest))
            last = min(position, computed)
            seen[entry.first : last] = True
            start = entry.first if window is None else max(entry.first, computed - window + 1)
            if last > start:
                arena = self.hosts[group] if entry.on_host else self.arenas[group]
                values = arena.read(kind, entry.offset, start - entry.first, last - start)
                right = values[:, 0] == hashes[start:last]
                assert right.all(), f"{request.request_id}: position {start + np.argmin(right)} holds another's KV"
                worst = max(worst, int(values[:, 1].max()))
                assert kind.lossiness <= values[:, 1].min()
                assert worst <= floor
        assert position >= computed
        missing = set(np.flatnonzero(~seen).tolist())
        if window is not None:
            missing -= set(range(computed - window + 1))
        recent = total = 128  # the least that any setting keeps
        if "heavy_hitter" in self.evictions:
            recent = 64  # and then the window takes what the other kept beyond these
            total = 64 if "window" in self.evictions or not self.reports_attention else 128
        keep = recent if request.num_evicted_tokens else computed
        if not request.cache.allow_eviction:
            assert request.num_evicted_tokens == 0
            keep = computed
        allowed = set(range(self.sinks, max(self.sinks, computed - keep)))
        assert missing <= allowed, f"{request.request_id} lacks {sorted(missing - allowed)[:5]} of {computed}"
        assert len(missing) <= max(0, computed - self.sinks - total)
        return worst

    def check(self) -> None:
        """Integrity of the bookkeeping, and of the bytes of every running request."""
        self.cache.check_integrity()
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            if self.cache.holds(request):
                for group in range(len(self.arenas)):
                    self.read_all(request, group, request.num_computed_tokens)
        counters = self.counters
        assert 0 <= counters.prefix_cache_hits <= counters.prefix_cache_queries
        assert 0.0 <= self.cache.converged_fraction() <= 1.0
        assert 0.0 <= self.cache.usage().kv_usage <= 1.0

    def hashes(self, request: Request) -> npt.NDArray[np.uint32]:
        """Prefix hashes of all known tokens."""
        known = self._hashes.get(request.request_id)
        if known is None or len(known) != request.num_tokens:
            known = np.array(prefix_hashes(request.all_ids, request.cache.salt), np.uint32)
            self._hashes[request.request_id] = known
        return known

    def table(self, request: Request, group: int = 0) -> list[tuple[str, int, int, int]]:
        """(format, offset, first, valid) of every entry."""
        return [
            (FORMATS[entry.format_code].name, entry.offset, entry.first, entry.valid)
            for entry in self.cache.entries(request, group)
        ]

    def positions(self, request: Request, group: int = 0) -> set[int]:
        """What the next token would attend, besides itself."""
        return {first + i for _, _, first, valid in self.table(request, group) for i in range(valid)}

    def sizes(self, request: Request, group: int = 0) -> list[tuple[str, int]]:
        """Class of every block."""
        sequence = self.cache._by_request[request.request_id]
        return [(block.block_class.kv_format, block.size) for block in sequence.tables[group].blocks]


def ids(seed: int, count: int) -> list[int]:
    """A reproducible prompt, unlike those of other seeds."""
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(count)]
