"""What a profile says of the link to host memory: from how many tokens on moving KV is cheaper than computing it. No
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.formats import CHUNK_TOKENS
from engine.memory_model import GroupSpec, token_bytes
from engine.step_counts import STEP_INDEX, STEP_TERMS
from engine.transfers import Direction, HostLink
from envs.latency_model import LatencyModel


def crossover_tokens(groups: Sequence[GroupSpec], model: LatencyModel, link: HostLink, max_tokens: int) -> int | None:
    """The shortest native prefix (in whole chunks) that comes back over the link, and the one token after it computed,
    sooner than all of it is computed in one step; None if none up to ``max_tokens`` does.
    """
    per_token = sum(token_bytes(group.shape) for group in groups)
    for tokens in range(CHUNK_TOKENS, max_tokens + 1, CHUNK_TOKENS):
        copy_ns = link.copy_ns(Direction.IN, round(tokens * per_token))
        again_ns = model.step_ns(prompt_counts(groups, tokens + 1, model.knee_tokens))
        if copy_ns + model.step_ns(token_counts(groups, tokens)) < again_ns:
            return tokens
    return None


def prompt_counts(groups: Sequence[GroupSpec], tokens: int, knee: int) -> list[int]:
    """Counts of a step that computes a whole prompt."""
    counts = [0] * len(STEP_TERMS)
    layers = sum(len(group.layers) for group in groups)
    counts[STEP_INDEX["step"]] = counts[STEP_INDEX["sample"]] = counts[STEP_INDEX["prefill_sequence"]] = 1
    counts[STEP_INDEX["prefill_token"]], counts[STEP_INDEX["chunk_step"]] = tokens, 1
    counts[STEP_INDEX["token_beyond_knee"]] = max(0, tokens - knee)
    counts[STEP_INDEX["prefill_kv_native"]] = layers * tokens
    counts[STEP_INDEX["prefill_pair"]] = layers * (tokens * (tokens + 1) // 2)
    return counts


def token_counts(groups: Sequence[GroupSpec], context: int) -> list[int]:
    """Counts of a step that computes one token behind others."""
    counts = [0] * len(STEP_TERMS)
    layers = sum(len(group.layers) for group in groups)
    counts[STEP_INDEX["step"]] = counts[STEP_INDEX["sample"]] = counts[STEP_INDEX["decode_sequence"]] = 1
    counts[STEP_INDEX["decode_kv_native"]] = layers * (context + 1)
    counts[STEP_INDEX["decode_block"]] = layers * -(-(context + 1) // CHUNK_TOKENS)
    return counts
