"""Size pool and load to a measured machine, so that memory for KV, not compute, is what runs out. Pure functions.

With ``n`` requests running, a decode step takes ``step_s + n * per_sequence_s`` and gives every one of them a token;
a prompt takes its length over the prefill rate, and nothing else runs meanwhile. So a request costs the engine

    prompt / prefill_tps + output * (step_s / n + per_sequence_s)     seconds,

of which ``step_s / n`` shrinks the more requests the cache can hold: that is what a smaller KV format buys. The pool is
made to hold so few native requests that this share is the larger one, and the peaks of the load lie between what the
engine can serve with that many and with as many as fit when old blocks are stored in 4 bits.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

# Stated factors; see SizedLoad.lines.
LONGEST_REQUEST_S = 12.0  # how long one average request may take on an idle engine, else lengths are divided further
CONTEXT_SHARE = 0.2  # of the model's context that an average request fills at its end
LEAST_RESIDENT_TOKENS = 240  # but not below this, since recent tokens stay native and short requests are mostly recent
CHEAPER_SHARE = 3.0  # how much more of a request's cost the shrinking share is than the rest, at the native limit
LEAST_RUNNING, MOST_RUNNING = 4, 8
PEAK_BETWEEN = 0.65  # 0: the native limit, 1: the compressed limit (geometrically)
TTFT_FACTOR = 10.0
TBT_FACTOR = 2.0
LEAST_TTFT_S, LEAST_TBT_S = 0.25, 0.01
MAX_NATIVE_SLABS = 4096
_LEAST = "the least taken"


@dataclass(frozen=True)
class Rates:
    """What this machine sustains, measured in a closed loop through the server at native defaults.

    ``ttft_s``: of a prompt of ``probe_prompt_tokens`` on an idle engine; ``gap_s``: between its tokens.
    """

    prefill_tps: float
    step_s: float
    per_sequence_s: float
    ttft_s: float
    gap_s: float
    probe_prompt_tokens: int

    def decode_tps(self, running: int) -> float:
        """Tokens per second of all sequences together."""
        return running / (self.step_s + running * self.per_sequence_s)

    def capacity_rps(self, prompt: float, output: float, running: float) -> float:
        """Requests per second with ``running`` at once."""
        return 1.0 / (prompt / self.prefill_tps + output * (self.step_s / running + self.per_sequence_s))

    def alone_s(self, prompt: float, output: float) -> float:
        """Seconds of one request on an idle engine."""
        return prompt / self.prefill_tps + output * (self.step_s + self.per_sequence_s)


@dataclass(frozen=True)
class Memory:
    """KV bytes of the model at hand. ``slab_tokens``: native tokens per slab, of which one stays in reserve."""

    native_token_bytes: float
    small_token_bytes: float  # in the smallest format
    always_native_tokens: int  # per sequence: the recent ones and the block being written
    slab_tokens: int
    least_slabs: int
    max_model_len: int


@dataclass(frozen=True)
class SizedLoad:
    """A pool and a load. ``native_running``: average requests that fit in native; ``small_running``: compressed.

    ``ttft_why``, ``tbt_why``: where the targets come from, for people.
    """

    length_scale: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    pool_bytes: int
    pool_tokens: int
    native_running: int
    small_running: int
    native_limit_rps: float
    small_limit_rps: float
    peak_rps: float
    ttft_target_s: float
    tbt_target_s: float
    ttft_why: str
    tbt_why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def length_scale(rates: Rates, mean_prompt: float, mean_output: float, max_model_len: int) -> float:
    """By how much to divide a workload's lengths: an average request may take LONGEST_REQUEST_S on an idle engine and
    fill CONTEXT_SHARE of the context, but is to hold LEAST_RESIDENT_TOKENS on average; never under 1.
    """
    time = rates.alone_s(mean_prompt, mean_output) / LONGEST_REQUEST_S
    room = (mean_prompt + mean_output) / (max_model_len * CONTEXT_SHARE)
    return max(1.0, min(max(time, room), (mean_prompt + mean_output / 2) / LEAST_RESIDENT_TOKENS))


def size(rates: Rates, memory: Memory, scale: float, mean_prompt: float, mean_output: float) -> SizedLoad:
    """The pool and the peak rate for requests of these mean lengths (already divided by ``scale``)."""
    fixed_s = mean_prompt / rates.prefill_tps + mean_output * rates.per_sequence_s
    wanted = mean_output * rates.step_s / (CHEAPER_SHARE * fixed_s)
    running = min(MOST_RUNNING, max(LEAST_RUNNING, round(wanted)))
    resident = mean_prompt + mean_output / 2  # of a running request, on average over its life
    slabs = max(memory.least_slabs, 1 + math.ceil(running * resident / memory.slab_tokens))
    slabs = min(slabs, MAX_NATIVE_SLABS)
    tokens = (slabs - 1) * memory.slab_tokens
    running = max(1, int(tokens / resident))
    native_part = min(resident, memory.always_native_tokens)
    small_bytes = native_part * memory.native_token_bytes + (resident - native_part) * memory.small_token_bytes
    small_running = max(running, int(tokens * memory.native_token_bytes / small_bytes))
    native_limit = rates.capacity_rps(mean_prompt, mean_output, running)
    small_limit = rates.capacity_rps(mean_prompt, mean_output, small_running)
    longer = max(1.0, mean_prompt / rates.probe_prompt_tokens)
    ttft_s = TTFT_FACTOR * rates.ttft_s * longer
    # While others' prompts are computed, a token takes a step and a prompt: users see that on an idle machine too.
    tbt_s = TBT_FACTOR * (running / rates.decode_tps(running) + mean_prompt / rates.prefill_tps)
    idle = f"{TTFT_FACTOR:g} x idle" + (f", for a prompt {longer:.2g} times as long" if longer > 1 else "")
    return SizedLoad(
        length_scale=scale,
        mean_prompt_tokens=mean_prompt,
        mean_output_tokens=mean_output,
        pool_bytes=math.ceil(slabs * memory.slab_tokens * memory.native_token_bytes),
        pool_tokens=tokens,
        native_running=running,
        small_running=small_running,
        native_limit_rps=native_limit,
        small_limit_rps=small_limit,
        peak_rps=native_limit * (small_limit / native_limit) ** PEAK_BETWEEN,
        ttft_target_s=max(LEAST_TTFT_S, ttft_s),
        tbt_target_s=max(LEAST_TBT_S, tbt_s),
        ttft_why=idle if ttft_s > LEAST_TTFT_S else _LEAST,
        tbt_why=f"{TBT_FACTOR:g} x a step that also takes in a prompt" if tbt_s > LEAST_TBT_S else _LEAST,
    )
