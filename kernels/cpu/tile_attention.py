"""One tile's part of attention: products with its keys, a step of the online softmax, the sum of its values."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compile import fast, inlined
from kernels.cpu.lowlevel import exp_nonpositive, load, store
from kernels.cpu.tiles import BITS_K, BITS_V, K_CODES, K_SCALE, K_ZERO, TILE_TOKENS, V_CODES, V_SCALE, V_ZERO, unpack
from kernels.layout import CHUNK_TOKENS, QUANT_TILE_TOKENS

_ROWS = 4  # rows of a tile handled together: four independent sums hide the latency of multiply-add


@fast
def _scores(query: Any, keys: Any, start: Any, valid: Any, group: Any, head_dim: Any, scores: Any) -> None:
    """scores[g, t] = query[g] . keys[t] for the ``valid`` rows from element ``start`` of ``keys``."""
    for first in range(0, valid, _ROWS):
        # Rows past the last one repeat it: they are masked later, and nothing past ``valid`` is read.
        k0 = start + first * head_dim
        k1 = start + min(first + 1, valid - 1) * head_dim
        k2 = start + min(first + 2, valid - 1) * head_dim
        k3 = start + min(first + 3, valid - 1) * head_dim
        for g in range(group):
            q = g * head_dim
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for d in range(head_dim):
                x = load(query, q + d)
                s0 += x * load(keys, k0 + d)
                s1 += x * load(keys, k1 + d)
                s2 += x * load(keys, k2 + d)
                s3 += x * load(keys, k3 + d)
            row = g * QUANT_TILE_TOKENS + first
            scores[row], scores[row + 1], scores[row + 2], scores[row + 3] = s0, s1, s2, s3


@fast
def _add_values(weights: Any, values: Any, start: Any, valid: Any, group: Any, head_dim: Any, sums: Any) -> None:
    """sums[g] += sum over t of weights[g, t] * values[t], for rows from element ``start`` of ``values``."""
    for first in range(0, valid, _ROWS):
        v0 = start + first * head_dim
        v1 = start + min(first + 1, valid - 1) * head_dim
        v2 = start + min(first + 2, valid - 1) * head_dim
        v3 = start + min(first + 3, valid - 1) * head_dim
        for g in range(group):
            row = g * QUANT_TILE_TOKENS + first
            w0, w1, w2, w3 = weights[row], weights[row + 1], weights[row + 2], weights[row + 3]
            target = g * head_dim
            for d in range(head_dim):
                added = (w0 * load(values, v0 + d) + w1 * load(values, v1 + d)) + (
                    w2 * load(values, v2 + d) + w3 * load(values, v3 + d)
                )
                store(sums, target + d, load(sums, target + d) + added)


@inlined
def tile_scores(
    query: Any, codes: Any, elements: Any, form: Any, tile: Any, valid: Any, head_dim: Any, work: Any, scores: Any
) -> None:
    """scores[g, t] = query[g] . key[t] for the ``valid`` tokens of the tile at byte ``tile``."""
    scaled, scratch = work
    group = query.shape[0] // head_dim
    if form[BITS_K] == 0:
        _scores(query, elements, (tile + form[K_CODES]) // elements.itemsize, valid, group, head_dim, scores)
        return
    scale, zero = (tile + form[K_SCALE]) // elements.itemsize, (tile + form[K_ZERO]) // elements.itemsize
    unpack(codes, tile + form[K_CODES], form[BITS_K], valid, head_dim, scratch, 0)
    for g in range(group):
        for d in range(head_dim):
            scaled[g * head_dim + d] = query[g * head_dim + d] * load(elements, scale + d)
    _scores(scaled, scratch, 0, valid, group, head_dim, scores)
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
    half = tokens // 2
    upper = np.empty(QUANT_TILE_TOKENS // 2, dtype=np.float32)
    for g in range(best.shape[0]):
        row = scores[g * QUANT_TILE_TOKENS : g * QUANT_TILE_TOKENS + tokens]
        for t in range(tokens):
            row[t] = row[t] if begin <= t < end else -np.inf
        # Halves first: an elementwise maximum is vectorised, a running one is not (NaN forbids it).
        for t in range(half):
            upper[t] = max(row[half + t], row[t])
        peak = best[g]
        for t in range(half):
            peak = max(upper[t], peak)
        if peak > best[g]:
            shrink = exp_nonpositive(best[g] - peak)
            best[g] = peak
            total[g] *= shrink
            for d in range(head_dim):
                sums[g * head_dim + d] *= shrink
        for t in range(tokens):
            weight = exp_nonpositive(row[t] - peak)
            row[t] = weight if begin <= t < end else np.float32(0)
        added = np.float32(0)
        for t in range(tokens):
            added += row[t]
        total[g] += added


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
        _add_values(weights, elements, (tile + form[V_CODES]) // elements.itemsize, valid, group, head_dim, sums)
        return
    scale, zero = (tile + form[V_SCALE]) // elements.itemsize, (tile + form[V_ZERO]) // elements.itemsize
    unpack(codes, tile + form[V_CODES], form[BITS_V], valid, head_dim, scratch, 0)
    for g in range(group):
        shift = np.float32(0)
        for t in range(valid):
            weight = weights[g * QUANT_TILE_TOKENS + t]
            shift += weight * load(elements, zero + t)
            weights[g * QUANT_TILE_TOKENS + t] = weight * load(elements, scale + t)
        for d in range(head_dim):
            sums[g * head_dim + d] += shift
    _add_values(weights, scratch, 0, valid, group, head_dim, sums)
