"""Tails of what requests wait for: their first token and the gaps between the others, and how many are in time.

Pure arithmetic over arrays of settings (numpy only), in seconds. Queues are the textbook's: prompts wait for one server
whose service is a prompt's chunks (M/G/1), sequences for room among ``most`` (M/G/N, Sakasegawa's approximation); in a
short horizon no queue gets longer than arrivals scatter, however idle the server: it does not save up time.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from envs.signals import Targets
from policies.load import Load
from policies.step_times import ONE, ZERO, Chunks, Floats, StepTimes

_LEAST: Final = np.array(1e-9)
_TAIL: Final = 1.64  # of a normal distribution, 95 %
_ALMOST: Final = np.array(0.999)  # of what can be served: beyond, a queue has no steady state


def gaps(
    times: StepTimes, chunks: Chunks, n: Floats, most: Floats, steps: float, targets: Targets
) -> tuple[Floats, Floats]:
    """The tail of gaps between tokens where ``n`` sequences decode, and the share of requests with all in time."""
    late, limit = 1 - targets.quantile, targets.tbt_s
    # Whoever decodes is met by all chunks of others: so many per request, over its own steps.
    each = n / steps
    full = np.minimum(ONE, each * chunks.full)
    rest = np.minimum(ONE - full, each * chunks.rest)
    decode_s, full_s = times.decode_s(np.minimum(most, n + _TAIL * np.sqrt(n))), chunks.full_s
    excess = full + rest - late
    inside = np.minimum(ONE, np.maximum(ZERO, excess) / np.maximum(_LEAST, rest))
    # All of a chunk, where full ones alone are more than a tail.
    tail = np.maximum(np.where(excess >= 0, chunks.step_s(inside * chunks.size), decode_s), decode_s)
    # Gaps beyond the limit: all, those with full chunks, or a part of the rests.
    above = full_s - limit
    over = np.minimum(ONE, np.maximum(ZERO, above) / np.maximum(_LEAST, full_s - decode_s))
    beyond = np.where(decode_s > limit, ONE, full * (above > 0) + rest * over)
    # A request is late where more than its share of gaps is: about normal over so many meetings with chunks.
    spread = np.sqrt(np.maximum(beyond - beyond * beyond, 1e-4))
    z = (math.sqrt(max(1.0, steps / 4)) * (late - beyond)) / spread
    # About the normal distribution's probability of less than z.
    return tail, ONE / (ONE + np.exp(np.minimum(30.0, -1.702 * z)))


def held_up(chunks: Chunks, load: Load, steps: float) -> Floats:
    """What prompts that wait already when a sequence begins to decode cost it: they are computed before its next
    tokens. As many as a queue with one server leaves behind, and no more chunks than it has ``steps``.

    Seconds per request beyond those of steps that decode anyway, float64 [settings].
    """
    use = np.minimum(_ALMOST, load.rate_rps * chunks.alone_s)
    varied = _varied(load)
    left = use + (0.5 * (1 + varied)) * use * use / (ONE - use)
    cut = np.maximum(_LEAST, chunks.full + chunks.rest)
    held_s: Floats = np.minimum(left, steps / cut) * chunks.extra_s
    return held_s


def _varied(load: Load) -> float:
    """Squared coefficient of variation of prompts' lengths."""
    return load.prompt.second / load.prompt.mean**2 - 1


def first_tokens(
    chunks: Chunks,
    n: Floats,
    wanted: Floats,
    most: Floats,
    most_rps: Floats,
    load: Load,
    horizon_s: float,
    targets: Targets,
) -> tuple[Floats, Floats]:
    """The tail of first-token times over the horizon, and the share of requests whose first token is in time.

    ``n``: the smaller of how many sequences are ``wanted`` to decode and of how many can at ``most``.
    """
    late, limit, prompt, rate = 1 - targets.quantile, targets.ttft_s, load.prompt, load.rate_rps
    service, pressure = chunks.alone_s, rate / most_rps
    # In a short time a queue gets no longer than by how far arrivals scatter above what can be served.
    varied = _varied(load)
    scatter = _TAIL * math.sqrt((1 + varied) * rate * horizon_s)
    # Prompts, one after the other.
    use = np.minimum(_ALMOST, rate * service)
    unused = ONE - use
    behind = (0.5 * (1 + varied)) * service / unused * np.log(np.maximum(ONE, (1 / late) * use))
    prefill_tail = np.minimum(scatter * service, behind)
    own = np.maximum(ZERO, chunks.full_s / chunks.size * (prompt.p95 * (1 - load.hit_rate)) - service)
    # Room for a sequence.
    full = np.minimum(_ALMOST, np.maximum(pressure, wanted / most))
    waits = (np.sqrt(2 * (most + ONE)) - ONE) * np.log(full)  # logarithm of the share that waits at all
    room_tail = np.maximum(ZERO, waits - math.log(late)) / (most_rps * (ONE - full))
    spare = np.maximum(ZERO, most_rps - rate) * horizon_s + (most - n)
    room_tail = np.minimum(np.maximum(ZERO, scatter - spare) / most_rps, room_tail)
    usual = service + 0.5 * chunks.decode_s
    steady = np.hypot(np.hypot(prefill_tail, room_tail), own)
    # What waits now, and what will when more comes than can be served.
    backlog = np.maximum((wanted - n) / most_rps, load.waiting * service)
    beyond = np.maximum(steady, backlog) + horizon_s * np.maximum(ZERO, pressure - ONE)
    room = math.log(late) * np.maximum(limit - usual, 1e-3 * limit)
    return usual + beyond, ONE - np.exp(room / np.maximum(_LEAST, beyond))
