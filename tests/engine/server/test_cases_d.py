"""Case D.13 when preempted requests are swapped: what clients get is what a large pool gives them, delta by delta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.request import CachePolicy, FinishReason, Request, SamplingParams
from engine.tunable_state import Patch

Build = Callable[..., Any]
NAMES = "abcdefgh"
MAX_TOKENS = 150
FORMATS = ("native", "int8", "native", "k8v4")


def ask(name: str) -> Request:
    prompt = [(i * 13 + ord(name)) % 256 for i in range(150)]
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, prompt_logprobs=0)
    return Request(name, prompt, params, 0, CachePolicy(use_prefix_cache=False))


def run(engine: Any, after_step: Callable[[int], None]) -> tuple[dict[str, list[Any]], dict[str, int]]:
    """Deltas by request, and how often each was preempted."""
    requests = [ask(name) for name in NAMES]
    deltas: dict[str, list[Any]] = {name: [] for name in NAMES}
    for request in requests:
        engine.core.add(request)
    for step in range(20_000):
        if engine.core.pause_s is None:
            return deltas, {request.request_id: request.num_preemptions for request in requests}
        engine.clock.advance_s(engine.core.pause_s or 0.001)
        if engine.core.has_work:
            for delta in engine.core.step():
                deltas[delta.request_id].append(delta)
        else:
            engine.core.background()
        engine.cache.check_integrity()
        after_step(step)
    raise AssertionError("no end in sight")


@pytest.mark.parametrize("link_bytes_per_s", [1e5, 1e7])
@pytest.mark.parametrize("switches", [False, True])
def test_swapped_requests_lose_and_repeat_nothing(new_engine: Build, link_bytes_per_s: float, switches: bool) -> None:
    """vllm-project/vllm#16832: one request is out and back at least twice; also while storage is switched."""
    large, _ = run(new_engine(pool_tokens=1 << 15), lambda _step: None)
    engine = new_engine(pool_tokens=768, host_pool_tokens=8192, host_offload="on", link_bytes_per_s=link_bytes_per_s)

    def out(step: int) -> None:
        if switches and step % 40 == 39:
            changes = {"kv_format": FORMATS[step // 40 % 4], "block_size": (64, 16, 32)[step // 40 % 3]}
            assert engine.core.patch(Patch(changes, "test")).http_status < 300

    small, preemptions = run(engine, out)
    counters = engine.core.stats().counters
    assert counters.swapped_in >= 2
    assert max(preemptions.values()) >= 2
    assert switches or counters.recomputed_tokens == 0
    for name in NAMES:
        tokens, scored = ([x for delta in small[name] for x in part(delta)] for part in (ids_of, scored_of))
        assert tokens == [x for delta in large[name] for x in ids_of(delta)]
        assert len(tokens) == MAX_TOKENS
        assert scored == ask(name).prompt_ids[1:]
        assert [delta.finish_reason for delta in small[name] if delta.finish_reason] == [FinishReason.LENGTH]
        assert small[name][-1].finish_reason is FinishReason.LENGTH


def ids_of(delta: Any) -> list[int]:
    return list(delta.token_ids)


def scored_of(delta: Any) -> list[int]:
    return [entry.token_id for entry in delta.prompt_logprobs]
