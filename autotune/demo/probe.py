"""Measure what a machine sustains, closed loop, in a few seconds: prefill rate and the time of a decode step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from autotune.demo.sizing import Rates
from autotune.replay.client import Client
from autotune.replay.handshake import Server
from autotune.replay.records import Outcome, RequestRecord
from envs.workload.trace import Trace, TraceRequest

SHORT_PROMPT, LONG_PROMPT = 64, 448
PROBE_OUTPUT, LONGEST_OUTPUT = 24, 256
PROBE_S = 0.3  # for how long a batch decodes, if its outputs are not longer than that
BATCHES = (1, 4, 16)
SHORTEST_STEP_S = 1e-5  # no engine that answers over HTTP is faster
FAST_GAP_S = 0.02  # a machine this fast has time for long prompts
SLOW_GAP_S = 0.15  # a machine this slow is measured with fewer and smaller batches


class ProbeError(Exception):
    """The engine did not answer the probe; one line."""


@dataclass
class _Prompts:
    """Probe prompts that share no prefix, so that each is computed."""

    server: Server
    used: int = 0

    def body(self, prompt: int, output: int) -> bytes:
        maker = self.server.prompts(Trace("probe", ()), seed=1)
        self.used += 1
        return self.server.body(maker, TraceRequest(0.0, prompt, output), self.used)


async def measure(client: Client, server: Server) -> Rates:
    """Rates of the engine behind ``client``. Raises ProbeError when a request fails."""
    prompts = _Prompts(server)

    async def batch(number: int, prompt: int, output: int) -> list[RequestRecord]:
        start_s = client.now_s()
        records = [RequestRecord(i, start_s, prompt, output) for i in range(number)]
        bodies = [prompts.body(prompt, output) for _ in records]
        await asyncio.gather(
            *(
                client.stream(record, body, exact_tokens=server.exact_tokens)
                for record, body in zip(records, bodies, strict=True)
            )
        )
        for record in records:
            if record.outcome is not Outcome.COMPLETED:
                raise ProbeError(f"a probe request failed: {record.failure} {record.message}")
        return records

    await batch(1, LONG_PROMPT, 4)  # first use: kernels are compiled, memory is touched
    await batch(2, SHORT_PROMPT, 4)
    short = [await batch(1, SHORT_PROMPT, 4) for _ in range(2)]
    long = [await batch(1, LONG_PROMPT, 4) for _ in range(2)]
    short_s, long_s = (min(_ttft_s(records[0]) for records in runs) for runs in (short, long))
    # Of whole runs: behind a client that is late, tokens come in bursts, and most single gaps are nothing.
    gap_s = median(mean_step_s(run) for run in (*short, *long))
    batches = BATCHES if gap_s < SLOW_GAP_S else BATCHES[:2]
    output = min(LONGEST_OUTPUT, max(PROBE_OUTPUT, round(PROBE_S / gap_s)))
    # Decoding over long contexts is what the load will do, and on a fast engine they are most of what a step costs.
    prompt = LONG_PROMPT if gap_s < FAST_GAP_S else SHORT_PROMPT
    steps = {number: mean_step_s(await batch(number, prompt, output)) for number in batches}
    step_s, per_sequence_s = fit_step(steps)
    per_token_s = max((long_s - short_s) / (LONG_PROMPT - SHORT_PROMPT), long_s / LONG_PROMPT / 4)
    return Rates(1.0 / per_token_s, step_s, per_sequence_s, long_s, steps[1], LONG_PROMPT)


def fit_step(steps: dict[int, float]) -> tuple[float, float]:
    """Least squares of step time over batch size, both parts kept positive: (fixed, per sequence) in seconds."""
    sizes, times = np.array(list(steps), dtype=float), np.array(list(steps.values()))
    slope, fixed = np.polyfit(sizes, times, 1)
    floor = float(times.min())
    return max(float(fixed), 0.1 * floor), max(float(slope), 0.005 * floor)


def mean_step_s(records: Sequence[RequestRecord]) -> float:
    """Time of a decode step with all records running, as they get their tokens: the mean gap from the last one's first
    token to the first one's end. Where the server is behind, tokens come in bursts, whose median gap would be nothing;
    where the client is, all of them can come at once.
    """
    start = max(record.token_times_s[0] for record in records)
    end = min(record.token_times_s[-1] for record in records)
    gaps, span_s = 0, 0.0
    for record in records:
        times = [time_s for time_s in record.token_times_s if start <= time_s <= end]
        if len(times) > 1:
            gaps, span_s = gaps + len(times) - 1, span_s + times[-1] - times[0]
    mean_s = span_s / gaps if gaps else fmean(gap for record in records for gap in record.gaps_s)
    return max(SHORTEST_STEP_S, mean_s)


def _ttft_s(record: RequestRecord) -> float:
    ttft_s = record.ttft_s
    if ttft_s is None:
        raise ProbeError("a probe request brought no token")
    return ttft_s
