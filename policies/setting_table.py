"""What of a set of settings depends on nothing but themselves, by column: looked up once for as long as the same ones
are in reach, since the effects of all of them are asked for at every tick. numpy only.
"""

from __future__ import annotations

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
from policies.step_times import Floats

Places = NDArray[np.int64]
KNOBS: Final = ("kv_format", "block_size", "eviction", "keep_tokens", "max_num_batched_tokens", "max_num_seqs")
"""The knobs whose effect is predicted, in the order of the columns of an array of settings."""
_FORMAT, _BLOCK, _EVICTION, _KEEP, _BUDGET, _SEQS = range(len(KNOBS))
_STRANDED_SLABS: Final = 2.0  # of quantised blocks: simulated engines that were kept full left one to three


@dataclass(frozen=True)
class EngineFacts:
    """What is fixed about an engine besides its profile. ``recode_tokens``: converted per step, at most."""

    recent_tokens: int = 64
    sinks: int = 16
    watermark: float = 0.01
    recode_tokens: int = 512


@dataclass(frozen=True, slots=True)
class SettingTable:
    """Arrays by setting, float64 unless said. ``now``: the row in force.

    ``kept``: int64, which of the lengths that eviction keeps is in force, 0 for none; ``evicts``: whether any is.
    Tokens: ``budget`` per step, ``fresh`` newest ones of a sequence that stay native, ``half_block`` reserved for
    nothing, ``capacity`` of the pool and ``native_capacity`` of it in native blocks of this size. ``lossy``: 1 where
    quantised, else 0; ``stranded``: share of the pool that such blocks leave unusable. Seconds: ``kv_s`` per quantised
    token that a step attends and ``block_s`` per token for its block table, ``recode_s`` and ``gather_s`` per token of
    a prompt. ``loss``: relative, of a token that attends only quantised ones. ``turning``: 1 where what is resident has
    to be converted, else 0; ``turning_on``: 1 where what is quantised already has not.
    """

    now: int
    kept: Places
    evicts: bool
    seqs: Floats
    budget: Floats
    fresh: Floats
    half_block: Floats
    capacity: Floats
    native_capacity: Floats
    lossy: Floats
    stranded: Floats
    kv_s: Floats
    block_s: Floats
    recode_s: Floats
    gather_s: Floats
    loss: Floats
    turning: Floats
    turning_on: Floats

    def __len__(self) -> int:
        return len(self.kept)


class SettingTables:
    """Makes tables for one engine. Raises ValueError for a pool that is too small for the model.

    ``capacity``: tokens of the pool, float64 [formats, block sizes]; ``loss`` [formats]; ``limits``: tokens of a
    sequence that are left by each value of ``keep_tokens``.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pool_bytes: int,
        model: LatencyModel,
        quality: QualityTable,
        facts: EngineFacts,
    ) -> None:
        layers = sum(len(group.layers) for group in groups)
        formats, sizes = (TUNABLES[name].values for name in ("kv_format", "block_size"))
        shape, price = (len(formats), len(sizes)), model.seconds
        self.limits = [int(keep) + facts.sinks for keep in TUNABLES["keep_tokens"].values]
        self.loss = np.array([quality.by_format[str(kind)] for kind in formats])
        self.capacity = np.array(
            [[pool_capacity(groups, pool_bytes, str(kind), int(size)) for size in sizes] for kind in formats], float
        )
        size = np.array([[class_for(str(f), int(size)).block_size for size in sizes] for f in formats], float)
        lossy = np.array([[float(kind != NATIVE.name)] for kind in formats])
        recode_s = [price.get(f"recode_{NATIVE.name}_{kind}", 0.0) * (kind != NATIVE.name) for kind in formats]
        gather = price.get("prefill_kv_native", 0.0), price.get("prefill_kv_lossy", 0.0)
        by_column = {
            "fresh": facts.recent_tokens + size / 2,
            "half_block": size / 2,
            "capacity": self.capacity,
            "native_capacity": self.capacity[0],
            "lossy": lossy,
            "stranded": lossy * (_STRANDED_SLABS / pool_layout(groups, pool_bytes).num_slabs),
            "kv_s": layers * np.array([[price.get(f"decode_kv_{kind}", 0.0)] for kind in formats]),
            "block_s": layers * price.get("decode_block", 0.0) / size,
            "recode_s": layers * np.array(recode_s)[:, None],
            "gather_s": layers * np.array([[gather[kind != NATIVE.name]] for kind in formats]),
            "loss": self.loss[:, None],
        }
        self._names = tuple(by_column)
        # One row a column, so that a table is one look-up.
        self._columns = np.array([np.broadcast_to(column, shape).ravel() for column in by_column.values()])
        self._sizes = len(sizes)
        self._budget = np.array(TUNABLES["max_num_batched_tokens"].values, float)
        self._seqs = np.array(TUNABLES["max_num_seqs"].values, float)

    @property
    def native_kv_s(self) -> float:
        """Seconds per native token that a step attends."""
        return float(self._columns[self._names.index("kv_s"), 0])

    def of(self, settings: Places, now: int) -> SettingTable:
        """For int64 [settings, knobs], places among each knob's values, of which row ``now`` is in force."""
        kind, block = settings[:, _FORMAT], settings[:, _BLOCK]
        columns = dict(zip(self._names, self._columns.take(kind * self._sizes + block, axis=1), strict=True))
        return SettingTable(
            now=now,
            kept=(settings[:, _EVICTION] > 0) * (1 + settings[:, _KEEP]),
            evicts=bool(settings[:, _EVICTION].any()),
            seqs=self._seqs[settings[:, _SEQS]],
            budget=self._budget[settings[:, _BUDGET]],
            turning=columns["lossy"] * (kind != kind[now]),
            turning_on=columns["lossy"] * (kind < kind[now]),
            **columns,
        )
