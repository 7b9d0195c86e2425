"""Every knob of the engine that can change while requests run: one declaration each. Nothing but the standard library
and ``kernels.layout``, which knows the storage formats and imports nothing else either.

Action space, configuration validation, metric labels, the control API and docs/tunables.md derive from ``TUNABLES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kernels.layout import FORMATS, NATIVE

TunableValue = str | int
TunableValues = dict[str, TunableValue]


class CostClass(StrEnum):
    """How a change takes effect."""

    STEP = "step"  # whole at the next step boundary
    BACKGROUND = "background"  # new blocks at once, resident ones by budgeted work
    RESTART = "restart"  # adapters to other engines only


@dataclass(frozen=True)
class Tunable:
    """One knob: its name, allowed values in order (mildest first), default, unit, cost class and meaning."""

    name: str
    values: tuple[TunableValue, ...]
    default: TunableValue
    unit: str
    cost_class: CostClass
    description: str

    def parse(self, value: object) -> TunableValue:
        """The declared value equal to ``value`` (text from a command line included).

        Raises ValueError naming the knob and its allowed values.
        """
        for allowed in self.values:
            if not isinstance(value, bool) and (value == allowed or (isinstance(value, str) and value == str(allowed))):
                return allowed
        choices = ", ".join(str(allowed) for allowed in self.values)
        raise ValueError(f"{self.name}: {value!r} is not allowed; choose one of {choices}")


_DECLARATIONS = (
    Tunable(
        "kv_format",
        tuple(kv_format.name for kv_format in FORMATS),
        NATIVE.name,
        "",
        CostClass.BACKGROUND,
        "Storage format of KV blocks older than recent_tokens. Resident blocks are recoded towards a lossier format; "
        "a milder one applies to new blocks only, since lost precision cannot be invented again.",
    ),
    Tunable(
        "block_size",
        (16, 32, 64, 128, 256),
        16,
        "tokens",
        CostClass.BACKGROUND,
        "Tokens per KV block. Large blocks make tables and copies cheap, small ones waste less in half-empty tails. "
        "Blocks of 16 tokens are native only: quantised ones then use 32. Where tokens will be quantised, new ones are "
        "written in quarters of a block, at least 16.",
    ),
    Tunable(
        "eviction",
        ("none", "window", "heavy_hitter"),
        "none",
        "",
        CostClass.BACKGROUND,
        "Which KV of a running sequence is dropped once its prompt is complete: nothing; all but the attention sinks "
        "and the last keep_tokens; or all but the sinks, the most recent tokens and those that attract most attention, "
        "keep_tokens in all.",
    ),
    Tunable(
        "keep_tokens",
        (128, 256, 512, 1024, 2048),
        512,
        "tokens",
        CostClass.BACKGROUND,
        "Tokens that eviction keeps of a sequence, besides the sinks.",
    ),
    Tunable(
        "prefix_eviction",
        ("lru", "lfu", "cost"),
        "lru",
        "",
        CostClass.STEP,
        "Which cached prefix nobody uses goes first when room is needed: the least recently used, the least frequently "
        "used, or the one that saves the least recomputation per byte.",
    ),
    Tunable(
        "host_offload",
        ("off", "on"),
        "off",
        "",
        CostClass.BACKGROUND,
        "Whether KV may move to host memory: blocks of preempted and idle sequences and cached prefixes. Needs an "
        "engine started with a host pool.",
    ),
    Tunable(
        "max_num_batched_tokens",
        (64, 128, 256, 512, 1024, 2048),
        512,
        "tokens",
        CostClass.STEP,
        "Token budget of one step: decode tokens first, the rest goes to prefill chunks. A small budget bounds TBT, "
        "a large one speeds prefill.",
    ),
    Tunable(
        "max_num_seqs",
        (1, 2, 4, 8, 16, 32, 64, 128, 256),
        64,
        "requests",
        CostClass.STEP,
        "Sequences that may run at once. Lowering it drains; it never stops a running request.",
    ),
)

TUNABLES: Final[Mapping[str, Tunable]] = {tunable.name: tunable for tunable in _DECLARATIONS}


def default_values() -> TunableValues:
    """A fresh dictionary of every knob at its default."""
    return {name: tunable.default for name, tunable in TUNABLES.items()}


def parse_change(name: str, value: object) -> TunableValue:
    """Validate one change. Raises ValueError for an unknown knob or a value that is not offered."""
    if name not in TUNABLES:
        raise ValueError(f"unknown tunable {name!r}; known: {', '.join(TUNABLES)}")
    return TUNABLES[name].parse(value)
