"""``alloc_overhead_reduction_pct``: the time that a cache takes to grow, paged against one that concatenates.

Sequences of equal length grow by one token per step, the same for both. *Overhead* is the time per generated token
that goes into having a place for it: everything from asking for room until the token is stored and known, less the
time of writing the same bytes where a place is known already (taken from the concatenating cache's tensors). For the
paged cache that is ``allocate``, ``commit`` (with prefix hashing and sealing), what block tables and slots add to
building the step's inputs, and the kernel that stores; for the other one ``torch.cat`` of every layer. Medians over
the steps. The attention that both feed is left out, the paged cache's loss or gain there too.

The figure is the median over the batch sizes at 1,024 tokens (the median prompt of the Azure 2023 chat trace has
1,020). The details have each batch size, at 256 tokens too: the paged cache's cost is nearly one of a step, whatever
batch and length, and one short sequence alone does not pay for it (a step takes some milliseconds). The bytes are
those of existing KV copied, read and written, against those of table rows and slots.
"""

from __future__ import annotations

import gc
from statistics import median

from engine.cache_bench.context import Context
from engine.cache_bench.growth import Case, Concatenating, Paged, reduction_pct
from engine.clock import Clock, RealClock
from engine.loader import LoadedModel

KEYS = ("alloc_overhead_reduction_pct", "alloc_bytes_reduction_pct", "alloc_overhead_by_batch")

_PROMPT = 1024
_SHORT_PROMPT = 256
_BATCHES = (1, 4, 16, 32, 64)
_QUICK_BATCHES = (1, 16)


def run(context: Context) -> dict[str, object]:
    """Percent less time and bytes, and microseconds per token by prompt length and batch size."""
    if context.device != "cpu":
        context.skip("measured on a processor only: a GPU works on after the clock has stopped")
    table: dict[str, dict[str, dict[str, float]]] = {}
    for prompt in (_SHORT_PROMPT, _PROMPT):
        for batch in _QUICK_BATCHES if context.quick else _BATCHES:
            case = Case(batch, prompt, steps=12 if context.quick else 48)
            figures = table.setdefault(str(prompt), {})[str(batch)] = compare(context.load(), case, RealClock())
            context.log(f"  {batch} sequences of {prompt} tokens: {figures}")
    counted = table[str(_PROMPT)].values()
    return {
        "alloc_overhead_reduction_pct": round(median(row["reduction_pct"] for row in counted), 2),
        "alloc_bytes_reduction_pct": round(median(row["bytes_reduction_pct"] for row in counted), 3),
        "alloc_overhead_by_batch": table,
    }


def compare(loaded: LoadedModel, case: Case, clock: Clock) -> dict[str, float]:
    """Both caches over one case: microseconds and bytes per token, and by how many percent they fall."""
    gc.collect()
    paged = Paged(loaded, case, clock).grow()
    concatenating = Concatenating(loaded, case, clock)
    floor_ns = concatenating.floor_ns()
    other = concatenating.grow()
    return {
        "paged_us": round(paged.token_ns / 1e3, 2),
        "concatenating_us": round(other.token_ns / 1e3, 2),
        "write_in_place_us": round(floor_ns / 1e3, 2),
        "reduction_pct": round(reduction_pct(paged.token_ns - floor_ns, other.token_ns - floor_ns), 2),
        "paged_bytes": round(paged.moved_bytes),
        "concatenating_bytes": round(other.moved_bytes),
        "bytes_reduction_pct": round(reduction_pct(paged.moved_bytes, other.moved_bytes), 3),
    }
