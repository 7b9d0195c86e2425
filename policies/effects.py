"""What settings would do to a load: memory, running sequences, TTFT, TBT, goodput and quality, from a profile.

Pure arithmetic over arrays of settings (numpy, no torch), cheap enough for every tick. Steps are priced by the
profile's own terms (:mod:`engine.step_counts`), memory by :mod:`engine.memory_model`. Queues are the textbook's:

- ``n`` decoding sequences, in steps of ``base + each n`` seconds, that end after ``O`` steps and arrive at a rate whose
  prompts take a share of the time, are in balance where ``n = rate (O base + H) / (1 - prompts - rate O each)``: ``H``
  is for the prompts that wait when one begins to decode, since those go first (the second term of a queue with
  priorities);
- what fits the pool and ``max_num_seqs`` bounds ``n``, which bounds the rate that can be served, and with it the wait
  for admission (M/G/N, Sakasegawa's approximation);
- prompts queue for one server, whose service is a prompt's chunks (M/G/1);
- a gap between tokens is a step with a full chunk, with the rest of a prompt or with none, each in proportion.

What depends on the settings alone is looked up once (:mod:`policies.setting_table`); tails are in
:mod:`policies.latency_tails`. Two hundred settings cost little more than two: the number of numpy calls counts.

Not predicted: which prefixes stay cached (``prefix_eviction``), and moves to the host (``host_offload``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.memory_model import GroupSpec
from engine.tunables import TUNABLES
from envs.latency_model import LatencyModel
from envs.reward import QualityTable
from envs.signals import Targets
from policies.latency_tails import first_tokens, gaps, held_up
from policies.load import Lengths, Load
from policies.setting_table import KNOBS, EngineFacts, Places, SettingTable, SettingTables
from policies.step_times import ONE, ZERO, Chunks, Floats, StepTimes, packed_s

__all__ = ["KNOBS", "Effect", "EffectModel", "Effects", "EngineFacts", "Places", "SettingTable", "places_of"]


@dataclass(frozen=True)
class Effect:
    """What one setting does; JSON-able by ``vars``.

    ``kv_occupancy``: share of the pool that requests hold. ``running``: sequences that decode. ``ttft_s``, ``tbt_s``:
    at the targets' quantile. ``most_rps``: arrivals beyond which requests queue up. ``goodput_share``: of arrivals,
    inside all targets. ``quality``: relative loss per generated token, ``dropped``: share of its context that eviction
    drops. ``converge_s``: until what is resident has the class asked for.
    """

    kv_occupancy: float
    running: float
    ttft_s: float
    tbt_s: float
    most_rps: float
    goodput_share: float
    quality: float
    dropped: float
    converge_s: float


@dataclass(frozen=True)
class Effects:
    """As :class:`Effect`, float64 [settings] each."""

    kv_occupancy: Floats
    running: Floats
    ttft_s: Floats
    tbt_s: Floats
    most_rps: Floats
    goodput_share: Floats
    quality: Floats
    dropped: Floats
    converge_s: Floats

    def row(self, index: int) -> Effect:
        return Effect(**{name: float(values[index]) for name, values in vars(self).items()})


@dataclass(frozen=True)
class _Held:
    """One decoding sequence under each setting: tokens held, those of them native and quantised, the share of what it
    saw that is dropped, and the share of the pool that it takes.
    """

    tokens: Floats
    native: Floats
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
        self.pool_bytes, self._engine = pool_bytes, (groups, model, quality)
        self._with_other_pool: EffectModel | None = None  # the last one asked for; spares work, decides nothing
        self.facts = facts or EngineFacts()
        self.evicted_loss = quality.evicted
        self._tables = SettingTables(groups, pool_bytes, model, quality, self.facts)
        self._stored, self._losses = self._tables.capacity[:, 1].tolist(), self._tables.loss.tolist()
        self._knee = float(model.knee_tokens)
        layers = sum(len(group.layers) for group in groups)
        self._windows = [(len(group.layers) / layers, group.window) for group in groups]
        price = model.seconds
        self._sequence_s = price.get("decode_sequence", 0.0) + price.get("sample", 0.0)
        self._base_s, self._beyond_s = price.get("step", 0.0), price.get("token_beyond_knee", 0.0)
        self._token_s = price.get("prefill_token", 0.0)
        # With a chunk comes a step of another kind, and others decode after it and when the request leaves.
        self._chunk_s = price.get("prefill_sequence", 0.0) + price.get("chunk_step", 0.0)
        self._chunk_s += 2 * price.get("regrouped", 0.0)
        self._pair_s = layers * price.get("prefill_pair", 0.0)

    def table(self, settings: Places, now: int = 0) -> SettingTable:
        """What :meth:`effects` needs to know of int64 [settings, knobs], places among each knob's values. Row ``now``
        is the setting in force, that resident KV is stored under.
        """
        return self._tables.of(settings, now)

    def for_pool(self, pool_bytes: int | None) -> EffectModel:
        """The same engine with another pool; this model for None and for a pool in which no engine would run.

        Capacities do not grow in proportion: a pool is cut into slabs, fewer and smaller ones where it is small.
        """
        if pool_bytes is None or pool_bytes == self.pool_bytes:
            return self
        if self._with_other_pool is None or self._with_other_pool.pool_bytes != pool_bytes:
            groups, model, quality = self._engine
            try:
                other = EffectModel(groups, pool_bytes, model, quality, self.targets, self.facts)
            except ValueError:
                return self
            self._with_other_pool = other
        return self._with_other_pool

    def effects(
        self,
        settings: Places | SettingTable,
        load: Load,
        *,
        now: int = 0,
        horizon_s: float = 10.0,
        time_scale: float = 1.0,
    ) -> Effects:
        """Effects over the next ``horizon_s`` seconds of settings as :meth:`table` takes or gives them (a table has its
        own ``now``). ``time_scale`` corrects the profile's step times.
        """
        table = settings if isinstance(settings, SettingTable) else self.table(settings, now)
        rate, prompt = max(load.rate_rps, 1e-6), load.prompt.mean
        steps, computed = max(1.0, load.output.mean), max(1.0, prompt * (1 - load.hit_rate))
        seen = _seen(load)
        held = self._hold(table, seen)
        times = self._times(table, load, held, time_scale)
        recode_s = (prompt + steps) * time_scale * table.recode_s
        room = (1 - self.facts.watermark) - _hole(table, load)

        # How many decode, if all fitted.
        in_hand = load.held_tokens / seen.mean
        guess = np.minimum(table.seqs, max(1.0, in_hand))
        chunks = Chunks.of(times, guess, computed)
        busy = np.minimum(ONE, rate * chunks.alone_s)
        held_up_s = held_up(chunks, load, steps)
        wanted = times.balance(rate, steps, chunks.extra_s + recode_s, held_up_s, guess, max(1.0, in_hand))
        # What is in hand ends in its own time; until then the balance is only on its way.
        in_hand = max(load.running, in_hand) + load.waiting
        spans = np.minimum(50.0, (horizon_s / steps) / chunks.decode_s)
        still = (ONE - np.exp(-spans)) / spans
        wanted = np.minimum(still * in_hand + (ONE - still) * wanted, in_hand + rate * horizon_s)

        # How many can. A prompt is native at first, and capacity arrives as recoding goes on.
        share, converge_s = self._share_soon(table, held, load, times, horizon_s)
        prompts = busy * prompt / table.native_capacity
        most = np.maximum(ONE, np.minimum(table.seqs, (room - prompts) / share))
        most_rps = ONE / (packed_s(times, most, steps, computed) + recode_s)
        n = np.minimum(wanted, most)
        chunks = Chunks.of(times, n, computed, busy)
        tbt_s, tbt_share = gaps(times, chunks, n, most, steps, self.targets)
        ttft_s, ttft_share = first_tokens(chunks, n, wanted, most, most_rps, load, horizon_s, self.targets)
        return Effects(
            kv_occupancy=np.minimum(ONE, n * share + prompts),
            running=n,
            ttft_s=ttft_s,
            tbt_s=tbt_s,
            most_rps=most_rps,
            goodput_share=np.minimum(ONE, most_rps / rate) * ttft_share * tbt_share,
            quality=self._quality(table, held),
            dropped=held.dropped,
            converge_s=converge_s,
        )

    def stored_loss(self, bytes_shares: Sequence[float]) -> float:
        """Relative loss of a token whose context is stored in these shares of bytes by format; 0 for nothing stored."""
        tokens = [share * capacity for share, capacity in zip(bytes_shares, self._stored, strict=True)]
        total = sum(tokens)
        lost = sum(stored * loss for stored, loss in zip(tokens, self._losses, strict=True))
        return lost / total if total > 0 else 0.0

    def _hold(self, table: SettingTable, seen: Lengths) -> _Held:
        cuts = [seen.cut_at(limit) for limit in self._tables.limits] if table.evicts else ()
        tokens = np.array([seen.mean, *(kept for kept, _ in cuts)])[table.kept]
        dropped = np.array([0.0, *(gone for _, gone in cuts)])[table.kept]
        # The newest tokens, and those of a block that is not full, stay native; half a block is reserved for nothing.
        lossy = table.lossy * np.maximum(ZERO, tokens - table.fresh)
        native = tokens - lossy
        share = (native + table.half_block) / table.native_capacity + lossy / table.capacity
        return _Held(tokens, native, lossy, dropped, share)

    def _quality(self, table: SettingTable, held: _Held) -> Floats:
        lost = table.loss * held.lossy / np.maximum(ONE, held.tokens)
        return lost + held.dropped * (self.evicted_loss - lost) if table.evicts else lost

    def _share_soon(
        self, table: SettingTable, held: _Held, load: Load, times: StepTimes, horizon_s: float
    ) -> tuple[Floats, Floats]:
        """The pool's share per sequence over the horizon, while KV is being converted, and how long that takes."""
        running = load.held_tokens / max(float(held.tokens[table.now]), 1.0)
        tokens = table.turning - load.lossy_share * table.turning_on  # of each that is held
        converge_s = (load.held_tokens / self.facts.recode_tokens) * tokens * times.decode_one_s(max(1.0, running))
        late = np.minimum(ONE, converge_s / (2 * horizon_s))
        return held.share + late * np.maximum(ZERO, held.share[table.now] - held.share), converge_s

    def _times(self, table: SettingTable, load: Load, held: _Held, scale: float) -> StepTimes:
        prompt, visible = load.prompt, 0.0
        contexts = []  # attended in each group of layers
        for share, window in self._windows:
            contexts.append(scale * share * (held.tokens if window is None else np.minimum(held.tokens, window)))
            visible += share * (1.0 if window is None else min(1.0, 2 * window / max(1.0, prompt.mean)))
        context = contexts[0] if len(contexts) == 1 else sum(contexts, ZERO)
        kv_s = (self._tables.native_kv_s * held.native + table.kv_s * held.lossy) / held.tokens
        each = scale * self._sequence_s + (kv_s + table.block_s) * context
        before = visible * prompt.second / prompt.mean / 2  # tokens in front of one of a prompt
        token = self._token_s + self._pair_s * before * (1 + load.hit_rate)
        chunk = scale * self._chunk_s + (scale * before) * table.gather_s
        return StepTimes(
            scale * self._base_s, each, scale * token, chunk, scale * self._beyond_s, self._knee, table.budget
        )


def _hole(table: SettingTable, load: Load) -> Floats:
    """Share of the pool that stays empty while requests wait: nobody passes the one at the head, which waits for native
    room for its whole prompt.

    Quantised blocks leave room where native ones cannot go until a slab is empty. The engine moves them together once
    that makes a whole slab, so a few stay behind.
    """
    head = load.prompt.second / load.prompt.mean / 2
    hole: Floats = np.minimum(0.5, table.stranded + head / table.native_capacity)
    return hole


def _seen(load: Load) -> Lengths:
    """Tokens that a decoding sequence has seen, at a moment of its time: long outputs are met more often."""
    prompt, progress = load.prompt, load.output.second / load.output.mean / 2
    mean = prompt.mean + progress
    return Lengths.of_moments(mean, mean * mean + prompt.second - prompt.mean**2 + progress**2)


def places_of(values: dict[str, str | int]) -> list[int]:
    """A row of settings for :meth:`EffectModel.effects`. Raises ValueError or KeyError for values that no knob has."""
    return [TUNABLES[knob].values.index(values[knob]) for knob in KNOBS]
