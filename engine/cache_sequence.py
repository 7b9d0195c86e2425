"""What the cache knows of one sequence, and the settings it works under. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.attention_mass import ChunkScores
from engine.block_table import BlockTable
from engine.chunks import num_tokens
from engine.formats import FORMAT_BY_NAME, lossiness_of, parse_block_size
from engine.tunables import TunableValues, parse_change


@dataclass(frozen=True)
class CacheSettings:
    """The cache's tunables, checked. Raises ValueError for a value that is not offered, naming those that are."""

    kv_format: str
    block_size: int
    eviction: str
    keep_tokens: int
    prefix_eviction: str
    host_offload: bool

    @classmethod
    def parse(cls, values: TunableValues) -> CacheSettings:
        """The cache's share of all tunables."""
        names = ("kv_format", "block_size", "eviction", "keep_tokens", "prefix_eviction", "host_offload")
        kv_format, block_size, eviction, keep_tokens, prefix_eviction, offload = (
            parse_change(name, values[name]) for name in names
        )
        return cls(
            str(kv_format),
            parse_block_size(block_size),
            str(eviction),
            int(keep_tokens),
            str(prefix_eviction),
            offload == "on",
        )

    @property
    def lossiness(self) -> int:
        return FORMAT_BY_NAME[self.kv_format].lossiness

    @property
    def evicts(self) -> bool:
        return self.eviction != "none"

    @property
    def observes(self) -> bool:
        """Whether eviction goes by the attention that an executor reports."""
        return self.eviction == "heavy_hitter"


@dataclass(slots=True, eq=False)
class CacheSequence:
    """One sequence's blocks. ``serial`` is unique for ever: a preempted request comes back under another.

    Pins of the prefix cache are sequences too, under negative serials: they hold blocks and never grow.

    ``committed``: tokens whose KV is written. ``end``: tokens with a slot. ``capacity``: tokens that fit without a new
    block in any group. ``max_lossiness``: the request's floor. ``lossiest``: the lossiest format that any of its tokens
    has been computed over so far. ``node``/``chained``: prefix node reached, after how many tokens (0: none, or the
    sequence is not entered in the prefix cache). ``frontier``: per group, up to where blocks were considered for
    recoding. ``epoch``: settings under which it was last looked at. ``hit_tokens``: those of a prefix hit that is not
    yet counted as a use. ``is_parked``: preempted with its KV kept, which may move to the host. ``host_below``: per
    group, the position below which its full blocks may lie on the host while it runs; all 0 unless it ``streams``.
    ``scores``: per group, what attention its chunks attracted, while that was observed. ``dropped``: per group, the
    chunks that eviction took, as a mask.
    """

    serial: int
    request_id: str
    max_lossiness: int
    allow_eviction: bool
    use_prefix_cache: bool
    tables: list[BlockTable]
    committed: int = 0
    end: int = 0
    capacity: int = 0
    node: int = 0
    chained: int = 0
    lossiest: int = 0
    is_evicted: bool = False
    epoch: int = 0
    hit_tokens: int = 0
    frontier: list[int] = field(default_factory=list)
    scores: list[ChunkScores] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    is_parked: bool = False
    host_below: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host_below = self.host_below or [0] * len(self.tables)

    @property
    def streams(self) -> bool:
        """Whether it may run with blocks on the host."""
        return any(self.host_below)

    @property
    def is_pin(self) -> bool:
        return self.serial < 0

    @property
    def is_floored(self) -> bool:
        """Whether its floor forbids some offered format."""
        return self.max_lossiness < lossiness_of(None)

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens whose KV eviction has dropped, in the group that lost most."""
        return max(map(num_tokens, self.dropped))
