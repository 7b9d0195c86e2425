"""One tile's part of attention: products with its keys, a step of the online softmax, the sum of its values."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compile import fast, inlined
from kernels.cpu.lowlevel import exp_nonpositive, load, prefetch
from kernels.cpu.tiles import BITS_K, BITS_V, K_CODES, K_SCALE, K_ZERO, TILE_TOKENS, V_CODES, V_SCALE, V_ZERO, unpack
from kernels.cpu.vector import LANES, WIDE, dot_products, weighted_rows
from kernels.cpu.vector_softmax import largest_score, weigh_scores
from kernels.layout import CHUNK_TOKENS, QUANT_TILE_TOKENS

_KEYS = 4  # per step of a tile's products
_CACHE_LINE = 64


def _scores(*, packed: bool) -> Any:
    # For 4, 2 or 1 query heads at a time: keys are converted once for all of them.
    dot_4, dot_2, dot_1 = (
        dot_products(heads, keys, WIDE, packed=packed) for heads, keys in ((4, _KEYS // 2), (2, _KEYS), (1, _KEYS))
    )
    dot_narrow = dot_products(1, _KEYS, LANES, packed=packed)
    parts = 2 if packed else 1

    @fast
    def scores_of(
        query: Any, keys: Any, start: Any, valid: Any, group: Any, head_dim: Any, codes: Any, ahead: Any, scores: Any
    ) -> None:
        """scores[g, t] = query[g] . keys[t] for the ``valid`` rows from element ``start`` of ``keys``.

        Rows past the last one repeat it: they are masked later, and nothing past ``valid`` is read. On the way, the
        bytes ``ahead`` (first, past the last) of ``codes`` are asked for, a few at a time: more at once would make
        loads wait.
        """
        last, line = valid - 1, ahead[0]
        is_wide = head_dim // parts % WIDE == 0
        part = (ahead[1] - ahead[0]) * _KEYS // valid
        for first in range(0, valid, _KEYS):
            stop = min(line + part, ahead[1])
            while line < stop:
                prefetch(codes, line)
                line += _CACHE_LINE
            g = 0
            while g < group:
                q, at = g * head_dim, g * QUANT_TILE_TOKENS + first
                if not is_wide:
                    dot_narrow(query, q, head_dim, keys, start, first, last, scores, at, QUANT_TILE_TOKENS)
                    g += 1
                elif group - g >= 4:
                    dot_4(query, q, head_dim, keys, start, first, last, scores, at, QUANT_TILE_TOKENS)
                    dot_4(query, q, head_dim, keys, start, first + 2, last, scores, at + 2, QUANT_TILE_TOKENS)
                    g += 4
                elif group - g >= 2:
                    dot_2(query, q, head_dim, keys, start, first, last, scores, at, QUANT_TILE_TOKENS)
                    g += 2
                else:
                    dot_1(query, q, head_dim, keys, start, first, last, scores, at, QUANT_TILE_TOKENS)
                    g += 1

    return scores_of


def _add_values(*, packed: bool) -> Any:
    # Sums of 4, 2 or 1 query heads at a time, over so many columns that 8 registers hold them.
    parts = 2 if packed else 1
    add_4, add_2, add_1 = (weighted_rows(h, v // parts, WIDE, packed=packed) for h, v in ((4, 2), (2, 4), (1, 4)))
    add_rest = weighted_rows(1, 1, LANES, packed=packed)
    few, many, rest = 2 * WIDE // parts, 4 * WIDE // parts, LANES

    @fast
    def add(weights: Any, values: Any, start: Any, valid: Any, group: Any, head_dim: Any, sums: Any) -> None:
        """sums[g] += sum over t of weights[g, t] * values[t], for rows from element ``start`` of ``values``."""
        width = head_dim // parts
        g = 0
        while g < group:
            w, at = g * QUANT_TILE_TOKENS, g * head_dim
            if group - g >= 4 and width % few == 0:
                for column in range(0, width, few):
                    add_4(weights, w, QUANT_TILE_TOKENS, values, start, valid, head_dim, column, sums, at)
                g += 4
            elif group - g >= 2 and width % many == 0:
                for column in range(0, width, many):
                    add_2(weights, w, QUANT_TILE_TOKENS, values, start, valid, head_dim, column, sums, at)
                g += 2
            else:
                whole = width // many * many
                for column in range(0, whole, many):
                    add_1(weights, w, QUANT_TILE_TOKENS, values, start, valid, head_dim, column, sums, at)
                for column in range(whole, width, rest):
                    add_rest(weights, w, QUANT_TILE_TOKENS, values, start, valid, head_dim, column, sums, at)
                g += 1

    return add


_scores_plain, _scores_packed = _scores(packed=False), _scores(packed=True)
_add_plain, _add_packed = _add_values(packed=False), _add_values(packed=True)


@inlined
def tile_scores(
    query: Any,
    codes: Any,
    elements: Any,
    form: Any,
    tile: Any,
    valid: Any,
    head_dim: Any,
    work: Any,
    ahead: Any,
    scores: Any,
) -> None:
    """scores[g, t] = query[g] . key[t] for the ``valid`` tokens of the tile at byte ``tile``; ``ahead``: `_scores`."""
    scaled, scratch = work
    group = query.shape[0] // head_dim
    if form[BITS_K] == 0:
        place = (tile + form[K_CODES]) // elements.itemsize
        _scores_plain(query, elements, place, valid, group, head_dim, codes, ahead, scores)
        return
    scale, zero = (tile + form[K_SCALE]) // elements.itemsize, (tile + form[K_ZERO]) // elements.itemsize
    for g in range(group):
        for d in range(head_dim):
            scaled[g * head_dim + d] = query[g * head_dim + d] * load(elements, scale + d)
    if form[BITS_K] == 8:
        _scores_plain(scaled, codes, tile + form[K_CODES], valid, group, head_dim, codes, ahead, scores)
    elif head_dim % 16 == 0:
        _scores_packed(scaled, codes, tile + form[K_CODES], valid, group, head_dim, codes, ahead, scores)
    else:
        unpack(codes, tile + form[K_CODES], form[BITS_K], valid, head_dim, scratch, 0)
        _scores_plain(scaled, scratch, 0, valid, group, head_dim, codes, ahead, scores)
    for g in range(group):
        shift = np.float32(0)
        for d in range(head_dim):
            shift += query[g * head_dim + d] * load(elements, zero + d)
        for t in range(form[TILE_TOKENS]):
            scores[g * QUANT_TILE_TOKENS + t] += shift


@fast
def softmax_step(
    scores: Any, begin: Any, end: Any, tokens: Any, head_dim: Any, best: Any, total: Any, sums: Any
) -> None:
    """Turn scores of tokens begin .. end - 1 into weights exp(score - best), all others into 0.

    Where a tile raises a head's ``best``, its ``total`` and ``sums`` so far are scaled down.
    """
    for g in range(best.shape[0]):
        at = g * QUANT_TILE_TOKENS
        peak = largest_score(scores, at, tokens, begin, end)
        if peak > best[g]:
            shrink = exp_nonpositive(best[g] - peak)
            best[g] = peak
            total[g] *= shrink
            for d in range(head_dim):
                sums[g * head_dim + d] *= shrink
        total[g] += weigh_scores(scores, at, tokens, begin, end, best[g])


@inlined
def note_chunks(weights: Any, begin: Any, end: Any, chunk: Any, best: Any, chunk_peaks: Any, chunk_sums: Any) -> None:
    """Keep what one tile's weights (of tokens begin .. end - 1) add up to per chunk of positions, and their peak.

    ``chunk``: the tile's first one; chunk_peaks, chunk_sums: float32 [group, chunks].
    """
    for part in range(begin // CHUNK_TOKENS, (end - 1) // CHUNK_TOKENS + 1):
        for g in range(best.shape[0]):
            start = g * QUANT_TILE_TOKENS + part * CHUNK_TOKENS
            added = np.float32(0)
            for t in range(CHUNK_TOKENS):
                added += weights[start + t]
            chunk_peaks[g, chunk + part] = best[g]
            chunk_sums[g, chunk + part] = added


@inlined
def chunk_shares(best: Any, total: Any, chunk_peaks: Any, chunk_sums: Any, mass: Any) -> None:
    """mass[c] = mean over the group of the share of chunk c in each head's weights; ``mass``: float32 [chunks]."""
    group, chunks = chunk_sums.shape
    for c in range(chunks):
        mass[c] = 0
    for g in range(group):
        if total[g] == 0:  # a padding sequence
            continue
        factor = np.float32(1) / (total[g] * np.float32(group))
        for c in range(chunks):
            mass[c] += chunk_sums[g, c] * exp_nonpositive(chunk_peaks[g, c] - best[g]) * factor


@inlined
def tile_values(
    codes: Any, elements: Any, form: Any, tile: Any, valid: Any, head_dim: Any, scratch: Any, weights: Any, sums: Any
) -> None:
    """sums[g] += sum over t of weights[g, t] * value[t]; overwrites the weights of a quantised tile."""
    group = sums.shape[0] // head_dim
    if form[BITS_V] == 0:
        _add_plain(weights, elements, (tile + form[V_CODES]) // elements.itemsize, valid, group, head_dim, sums)
        return
    scale, zero = (tile + form[V_SCALE]) // elements.itemsize, (tile + form[V_ZERO]) // elements.itemsize
    for g in range(group):
        shift = np.float32(0)
        for t in range(valid):
            weight = weights[g * QUANT_TILE_TOKENS + t]
            shift += weight * load(elements, zero + t)
            weights[g * QUANT_TILE_TOKENS + t] = weight * load(elements, scale + t)
        for d in range(head_dim):
            sums[g * head_dim + d] += shift
    if form[BITS_V] == 8:
        _add_plain(weights, codes, tile + form[V_CODES], valid, group, head_dim, sums)
    elif head_dim % 16 == 0:
        _add_packed(weights, codes, tile + form[V_CODES], valid, group, head_dim, sums)
    else:
        unpack(codes, tile + form[V_CODES], form[BITS_V], valid, head_dim, scratch, 0)
        _add_plain(weights, scratch, 0, valid, group, head_dim, sums)
