"""What settings would do to a load: memory, running sequences, TTFT, TBT, goodput and quality, from a profile.

Pure arithmetic over arrays of settings (numpy, no torch), cheap enough for every tick. Steps are priced by the
profile's own terms (:mod:`engine.step_counts`), memory by :mod:`engine.memory_model`. Queues are the textbook's:

- ``n`` decoding sequences, in steps of ``base + each n`` seconds, that end after ``O`` steps and arrive at a rate whose
  prompts take a share of the time, are in balance where ``n = rate O base / (1 - prompts - rate O each)``;
- what fits the pool and ``max_num_seqs`` bounds ``n``, which bounds the rate that can be served, and with it the wait
  for admission (M/G/N, Sakasegawa's approximation);
- prompts queue for one server, whose service is a prompt's chunks (M/G/1);
- a gap between tokens is a step with a full chunk, with the rest of a prompt or with none, each in proportion.

Not predicted: which prefixes stay cached (``prefix_eviction``), and moves to the host (``host_offload``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.formats import NATIVE, class_for
from engine.memory_model import GroupSpec, pool_capacity, pool_layout
from engine.tunables import TUNABLES
from envs.latency_model import LatencyModel
from envs.reward import QualityTable
from envs.signals import Targets
from policies.load import Lengths, Load
from policies.step_times import Chunks, Floats, StepTimes

Places = NDArray[np.int64]
KNOBS: Final = ("kv_format", "block_size", "eviction", "keep_tokens", "max_num_batched_tokens", "max_num_seqs")
"""The knobs whose effect is predicted, in the order of the columns of an array of settings."""
_FORMAT, _BLOCK, _EVICTION, _KEEP, _BUDGET, _SEQS = range(len(KNOBS))
_TAIL: Final = 1.64  # of a normal distribution, 95 %
_ROUNDS: Final = 1
_NONE, _ALL = np.zeros(1), np.ones(1)
_STRANDED_SLABS: Final = 2.0  # of quantised blocks: simulated engines that were kept full left one to three
_ALMOST: Final = 0.999  # of what can be served: beyond, a queue has no steady state


@dataclass(frozen=True)
class EngineFacts:
    """What is fixed about an engine besides its profile. ``recode_tokens``: converted per step, at most."""

    recent_tokens: int = 64
    sinks: int = 16
    watermark: float = 0.01
    recode_tokens: int = 512


@dataclass(frozen=True)
class Effect:
    """What one setting does; JSON-able by ``vars``.

    ``kv_occupancy``: share of the pool that requests hold. ``running``: sequences that decode. ``ttft_s``, ``tbt_s``:
    at the targets' quantile. ``served_rps``: completions. ``most_rps``: arrivals beyond which requests queue up.
    ``goodput_share``: of arrivals, inside all targets. ``quality``: relative loss per generated token, ``dropped``:
    share of its context that eviction drops. ``preemption_risk``: 0 to 1. ``converge_s``: until what is resident has
    the class asked for.
    """

    kv_occupancy: float
    running: float
    ttft_s: float
    tbt_s: float
    served_rps: float
    most_rps: float
    goodput_share: float
    quality: float
    dropped: float
    preemption_risk: float
    converge_s: float


@dataclass(frozen=True)
class Effects:
    """As :class:`Effect`, float64 [settings] each."""

    kv_occupancy: Floats
    running: Floats
    ttft_s: Floats
    tbt_s: Floats
    served_rps: Floats
    most_rps: Floats
    goodput_share: Floats
    quality: Floats
    dropped: Floats
    preemption_risk: Floats
    converge_s: Floats

    def row(self, index: int) -> Effect:
        return Effect(**{name: float(values[index]) for name, values in vars(self).items()})


@dataclass(frozen=True)
class _Held:
    """One decoding sequence under each setting: tokens held, those of them quantised, the share of what it saw that is
    dropped, and the share of the pool that it takes.
    """

    tokens: Floats
    lossy: Floats
    dropped: Floats
    share: Floats


class EffectModel:
    """Predicts effects on one engine. Holds tables only: ``effects`` depends on nothing but its arguments.

    ``model`` has prices in seconds, ``groups`` and ``pool_bytes`` the memory. Raises ValueError for a pool that is too
    small for the model.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pool_bytes: int,
        model: LatencyModel,
        quality: QualityTable,
        targets: Targets,
        facts: EngineFacts | None = None,
    ) -> None:
        self.targets = targets
        self.facts = facts or EngineFacts()
        self.evicted_loss = quality.evicted
        self._knee = float(model.knee_tokens)
        self._layers = sum(len(group.layers) for group in groups)
        self._windows = [(len(group.layers) / self._layers, group.window) for group in groups]
        formats, sizes = (TUNABLES[name].values for name in ("kv_format", "block_size"))
        price = model.seconds
        self._stranded = _STRANDED_SLABS / pool_layout(groups, pool_bytes).num_slabs
        self._capacity = np.array(
            [[pool_capacity(groups, pool_bytes, str(kind), int(size)) for size in sizes] for kind in formats], float
        )
        self._size = np.array([[class_for(str(f), int(size)).block_size for size in sizes] for f in formats], float)
        self._kv_s = self._layers * np.array([price.get(f"decode_kv_{kind}", 0.0) for kind in formats])
        self._recode_s = self._layers * np.array([price.get(f"recode_{NATIVE.name}_{kind}", 0.0) for kind in formats])
        self._recode_s[0] = 0.0
        gather = price.get("prefill_kv_native", 0.0), price.get("prefill_kv_lossy", 0.0)
        self._gather_s = self._layers * np.array([gather[kind != NATIVE.name] for kind in formats])
        self._is_lossy = np.array([float(kind != NATIVE.name) for kind in formats])
        self._loss = np.array([quality.by_format[str(kind)] for kind in formats])
        self._keep = [int(keep) for keep in TUNABLES["keep_tokens"].values]
        self._budget = np.array(TUNABLES["max_num_batched_tokens"].values, float)
        self._seqs = np.array(TUNABLES["max_num_seqs"].values, float)
        self._block_s = self._layers * price.get("decode_block", 0.0)
        self._sequence_s = price.get("decode_sequence", 0.0) + price.get("sample", 0.0)
        self._base_s, self._beyond_s = price.get("step", 0.0), price.get("token_beyond_knee", 0.0)
        self._token_s, self._chunk_s = price.get("prefill_token", 0.0), price.get("prefill_sequence", 0.0)
        self._pair_s = self._layers * price.get("prefill_pair", 0.0)

    def effects(
        self,
        settings: Places,
        load: Load,
        *,
        now: int = 0,
        horizon_s: float = 10.0,
        pool_scale: float = 1.0,
        time_scale: float = 1.0,
    ) -> Effects:
        """Effects of int64 [settings, knobs], places among each knob's values, over the next ``horizon_s`` seconds.

        Row ``now`` is the setting in force, that resident KV is stored under. ``pool_scale`` and ``time_scale`` correct
        the profile's pool and step times.
        """
        settings = np.asfortranarray(settings)  # columns are what is looked at
        kind, rate = settings[:, _FORMAT], max(load.rate_rps, 1e-6)
        steps, computed = max(1.0, load.output.mean), max(1.0, load.prompt.mean * (1 - load.hit_rate))
        seen = _seen(load)
        held = self._hold(settings, seen, pool_scale)
        times = self._times(settings, load, held, time_scale)
        recode_s = (load.prompt.mean + steps) * self._recode_s[kind] * time_scale
        room = 1 - self.facts.watermark - self._hole(settings, load) / pool_scale
        most_seqs = self._seqs[settings[:, _SEQS]]

        # How many decode, if all fitted. What prompts take depends on the room that decodes leave, hence the rounds.
        inside = np.minimum(most_seqs, max(1.0, load.held_tokens / seen.mean))
        busy = _NONE
        for _ in range(_ROUNDS):
            chunks = Chunks.of(times, inside, computed, busy)
            busy = np.minimum(1.0, rate * chunks.alone_s)
            wanted = times.balance(rate, steps, chunks.extra_s + recode_s, inside)
            inside = np.minimum(wanted, most_seqs)
        # What is in hand ends in its own time; until then the balance is only on its way.
        in_hand = max(load.running, load.held_tokens / seen.mean) + load.waiting
        spans = np.minimum(50.0, horizon_s / (steps * chunks.decode_s))
        still = (1 - np.exp(-spans)) / spans
        wanted = np.minimum(still * in_hand + (1 - still) * wanted, in_hand + rate * horizon_s)

        # How many can. A prompt is native at first, and capacity arrives as recoding goes on.
        share, converge_s = self._share_soon(settings, held, load, times, now, horizon_s)
        prompts = busy * (load.prompt.mean / pool_scale) / self._capacity[0, settings[:, _BLOCK]]
        most = np.maximum(1.0, np.minimum(most_seqs, (room - prompts) / share))
        packed = Chunks.of(times, most, computed, _ALL)
        most_rps = 1.0 / (np.maximum(packed.decode_s * steps / most + packed.extra_s, packed.alone_s) + recode_s)
        n = np.minimum(wanted, most)
        served = np.minimum(rate, most_rps)
        chunks = Chunks.of(times, n, computed, busy)
        tbt_s, in_time = self._gaps(times, chunks, n, most, steps)
        ttft_s, prompt_share = self._first(chunks, wanted, most, most_rps, load, horizon_s)
        demand, spread = wanted * held.share + prompts, held.share * np.sqrt(wanted) + 1e-9
        lost = self._loss[kind] * held.lossy / np.maximum(held.tokens, 1.0)
        return Effects(
            kv_occupancy=np.minimum(1.0, n * share + prompts),
            running=n,
            ttft_s=ttft_s,
            tbt_s=tbt_s,
            served_rps=served,
            most_rps=most_rps,
            goodput_share=served / rate * prompt_share * in_time,
            quality=lost * (1 - held.dropped) + held.dropped * self.evicted_loss,
            dropped=held.dropped,
            preemption_risk=_likely((demand - room) / spread),
            converge_s=converge_s,
        )

    def stored_loss(self, bytes_shares: Sequence[float]) -> float:
        """Relative loss of a token whose context is stored in these shares of bytes by format; 0 for nothing stored."""
        tokens = np.array(bytes_shares) * self._capacity[:, 1]
        total = float(tokens.sum())
        return float(tokens @ self._loss) / total if total > 0 else 0.0

    # -- memory -------------------------------------------------------------------------------------------------------

    def _hold(self, settings: Places, seen: Lengths, pool_scale: float) -> _Held:
        kind, block = settings[:, _FORMAT], settings[:, _BLOCK]
        tokens, dropped = np.full(len(settings), seen.mean), np.zeros(len(settings))
        evicts = settings[:, _EVICTION] > 0
        if evicts.any():
            limits = [keep + self.facts.sinks for keep in self._keep]
            kept = np.array([seen.capped(limit) for limit in limits])[settings[:, _KEEP]]
            gone = np.array([seen.share_beyond(limit) for limit in limits])[settings[:, _KEEP]]
            tokens, dropped = np.where(evicts, kept, tokens), np.where(evicts, gone, dropped)
        # The newest tokens, and those of a block that is not full, stay native; half a block is reserved for nothing.
        size = self._size[kind, block]
        fresh = self.facts.recent_tokens + size / 2
        lossy = self._is_lossy[kind] * np.maximum(0.0, tokens - fresh)
        native = (tokens - lossy + size / 2) / self._capacity[0, block]
        return _Held(tokens, lossy, dropped, (native + lossy / self._capacity[kind, block]) / pool_scale)

    def _hole(self, settings: Places, load: Load) -> Floats:
        """Share of the pool that stays empty while requests wait: nobody passes the one at the head, which waits for
        native room for its whole prompt.

        Quantised blocks leave room where native ones cannot go until a slab is empty. The engine moves them together
        once that makes a whole slab, so a few stay behind.
        """
        kind, block = settings[:, _FORMAT], settings[:, _BLOCK]
        head = load.prompt.second / load.prompt.mean / 2
        stranded = self._is_lossy[kind] * self._stranded
        hole: Floats = np.minimum(0.5, stranded + head / self._capacity[0, block])
        return hole

    def _share_soon(
        self, settings: Places, held: _Held, load: Load, times: StepTimes, now: int, horizon_s: float
    ) -> tuple[Floats, Floats]:
        """The pool's share per sequence over the horizon, while KV is being converted, and how long that takes."""
        kind = settings[:, _FORMAT]
        running = load.held_tokens / np.maximum(held.tokens[now], 1.0)
        step_s = times.decode_s(np.full(len(settings), max(1.0, running)))
        tokens = load.held_tokens * (1 - load.lossy_share * (kind <= kind[now])) * self._is_lossy[kind]
        converge_s = np.where(kind != kind[now], tokens / self.facts.recode_tokens * step_s, 0.0)
        late = np.minimum(1.0, converge_s / (2 * horizon_s))
        return held.share + late * np.maximum(0.0, held.share[now] - held.share), converge_s

    # -- time ---------------------------------------------------------------------------------------------------------

    def _times(self, settings: Places, load: Load, held: _Held, scale: float) -> StepTimes:
        kind, block = settings[:, _FORMAT], settings[:, _BLOCK]
        prompt, context, visible = load.prompt, np.zeros(len(settings)), 0.0
        for share, window in self._windows:
            context = context + share * (held.tokens if window is None else np.minimum(held.tokens, window))
            visible += share * (1.0 if window is None else min(1.0, 2 * window / max(1.0, prompt.mean)))
        kv = (self._kv_s[0] * (held.tokens - held.lossy) + self._kv_s[kind] * held.lossy) * context / held.tokens
        each = self._sequence_s + kv + self._block_s * context / self._size[kind, block]
        before = visible * prompt.second / prompt.mean / 2  # tokens in front of one of a prompt
        token = self._token_s + self._pair_s * before * (1 + load.hit_rate)
        chunk = self._chunk_s + self._gather_s[kind] * before
        return StepTimes(
            scale * self._base_s, scale * each, scale * token, scale * chunk, scale * self._beyond_s, self._knee,
            self._budget[settings[:, _BUDGET]],
        )  # fmt: skip

    def _gaps(self, times: StepTimes, chunks: Chunks, n: Floats, most: Floats, steps: float) -> tuple[Floats, Floats]:
        """The tail of gaps between tokens, and the share of requests whose gaps are in time."""
        late, limit = 1 - self.targets.quantile, self.targets.tbt_s
        # Whoever decodes is met by all chunks of others: so many per request, over its own steps.
        full = np.minimum(1.0, n * chunks.full / steps)
        rest = np.minimum(1.0 - full, n * chunks.rest / steps)
        decode_s, full_s = times.decode_s(np.minimum(most, n + _TAIL * np.sqrt(n))), chunks.full_s
        inside = np.minimum(1.0, np.maximum(0.0, full + rest - late) / np.maximum(rest, 1e-9))
        part_s = times.prefill_s(n, inside * chunks.size)
        tail = np.where(full >= late, full_s, np.where(full + rest >= late, part_s, decode_s))
        tail = np.maximum(tail, decode_s)
        # Gaps beyond the limit: all, those with full chunks, or a part of the rests.
        span = np.maximum(full_s - decode_s, 1e-12)
        over = np.minimum(1.0, np.maximum(0.0, full_s - limit) / span)
        beyond = np.where(decode_s > limit, 1.0, full * (full_s > limit) + rest * over)
        # A request is late where more than its share of gaps is: about normal over so many meetings with chunks.
        spread = np.sqrt(np.maximum(beyond * (1 - beyond), 1e-4) / max(1.0, steps / 4))
        return tail, _likely((late - beyond) / spread)

    def _first(
        self,
        chunks: Chunks,
        wanted: Floats,
        most: Floats,
        most_rps: Floats,
        load: Load,
        horizon_s: float,
    ) -> tuple[Floats, Floats]:
        """The tail of first-token times over the horizon, and the share of requests whose first token is in time."""
        late, limit, prompt, rate = 1 - self.targets.quantile, self.targets.ttft_s, load.prompt, load.rate_rps
        # Prompts, one after the other.
        service = chunks.alone_s
        use = np.minimum(_ALMOST, rate * service)
        varied = prompt.second / prompt.mean**2 - 1
        # In a short time a queue gets no longer than by how far arrivals scatter above what can be served.
        scatter = _TAIL * math.sqrt((1 + varied) * rate * horizon_s)
        behind = service * (1 + varied) / 2 / (1 - use)
        soon = np.maximum(0.0, scatter - (1 - use) / service * horizon_s) * service
        prefill_tail = np.minimum(soon, behind * np.log(np.maximum(1.0, use / late)))
        own = chunks.full_s / chunks.size * prompt.p95 * (1 - load.hit_rate)
        # Room for a sequence.
        full = np.minimum(_ALMOST, np.maximum(rate / most_rps, wanted / most))
        waits = full ** (np.sqrt(2 * (most + 1)) - 1)
        room_tail = np.log(np.maximum(1.0, waits / late)) / (most_rps * (1 - full))
        spare = np.maximum(0.0, most_rps - rate) * horizon_s + np.maximum(0.0, most - wanted)
        room_tail = np.minimum(np.maximum(0.0, scatter - spare) / most_rps, room_tail)
        usual = service + chunks.decode_s / 2
        steady = usual + np.sqrt(prefill_tail**2 + room_tail**2 + np.maximum(0.0, own - service) ** 2)
        # What waits now, and what will when more comes than can be served.
        grown = np.maximum(0.0, rate / most_rps - 1) * horizon_s
        backlog = np.maximum(np.maximum(0.0, wanted - most) / most_rps, load.waiting * service)
        tail = np.maximum(steady, usual + backlog) + grown
        return tail, 1 - np.exp(
            math.log(late) * np.maximum(limit - usual, 1e-3 * limit) / np.maximum(tail - usual, 1e-9)
        )


def _likely(z: Floats) -> Floats:
    """About the normal distribution's probability of less than ``z``."""
    return 1 / (1 + np.exp(np.minimum(30.0, -1.702 * z)))


def _seen(load: Load) -> Lengths:
    """Tokens that a decoding sequence has seen, at a moment of its time: long outputs are met more often."""
    prompt, progress = load.prompt, load.output.second / load.output.mean / 2
    mean = prompt.mean + progress
    return Lengths.of_moments(mean, mean * mean + prompt.second - prompt.mean**2 + progress**2)


def places_of(values: dict[str, str | int]) -> list[int]:
    """A row of settings for :meth:`EffectModel.effects`. Raises ValueError or KeyError for values that no knob has."""
    return [TUNABLES[knob].values.index(values[knob]) for knob in KNOBS]
