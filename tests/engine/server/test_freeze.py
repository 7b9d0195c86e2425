"""A freeze is a step, a command or a job that does not end; a loop that gets on, however slowly, is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from engine.request import CachePolicy, Request, SamplingParams
from engine.server.bridge import AsyncEngine
from engine.tunable_state import Patch

STALL_S = 60.0
LONG = 900  # tokens: eight chunks of a prompt, and as many blocks to convert


def request(name: str, prompt: int, output: int) -> Request:
    ids = [97 + place % 26 for place in range(prompt)]
    return Request(name, ids, SamplingParams(max_tokens=output, ignore_eos=True), 0, CachePolicy())


async def serve(engine: AsyncEngine, asked: Request) -> None:
    """Until its last token."""
    stream = await engine.submit(asked)
    while not any(delta.finish_reason for delta in await stream.take()):
        pass
    engine.forget(asked.request_id)


def test_a_loop_that_gets_on_is_no_freeze_however_slow_it_is(new_engine: Callable[..., Any]) -> None:
    """A long prompt, a long answer, a long conversion and commands in between: each step nearly as long as a freeze."""
    made = new_engine(kv_format="int8", max_num_batched_tokens=128, recent_tokens=32)
    seen: dict[str, list[str | None]] = {"step": [], "recode": [], "command": []}

    async def main() -> None:
        engine = AsyncEngine(made.core, made.clock, STALL_S)

        def look(what: str, seconds: float) -> None:
            made.clock.advance_s(seconds)
            seen[what].append(engine.unavailable_because)

        def command(core: Any) -> None:
            look("command", 59)
            core.patch(Patch({"kv_format": "int4"}, "test"))

        made.runner.before = lambda _plan: look("step", 40)
        made.runner.recode = lambda _batches: look("recode", 19)
        engine.start()
        await serve(engine, request("a", LONG, 30))
        await engine.call(command)
        await serve(engine, request("b", LONG, 4))
        while not seen["recode"]:  # what is left to convert is converted while nothing runs
            await engine.call(lambda _core: None)
        assert await engine.stop(0)

    asyncio.run(main())
    assert len(seen["step"]) > 8 + 30
    assert {reason for reasons in seen.values() for reason in reasons} == {None}


@pytest.mark.parametrize("where", ["step", "recode", "command"])
def test_whatever_does_not_end_is_a_freeze_until_it_does(new_engine: Callable[..., Any], where: str) -> None:
    made = new_engine(kv_format="int8", max_num_batched_tokens=128, recent_tokens=32)
    seen: list[str | None] = []

    async def main() -> None:
        engine = AsyncEngine(made.core, made.clock, STALL_S)

        def hang(*_: object) -> None:
            if not seen:
                made.clock.advance_s(STALL_S + 1)
                seen.append(engine.unavailable_because)

        if where == "step":
            made.runner.before = hang
        if where == "recode":
            made.runner.recode = hang
        engine.start()
        if where == "command":
            await engine.call(hang)
        await serve(engine, request("a", LONG, 4))
        while not seen:  # converted while nothing runs
            await engine.call(lambda _core: None)
        seen.append(await engine.call(lambda _core: engine.unavailable_because))
        assert await engine.stop(0)

    asyncio.run(main())
    assert seen == ["no step has ended for 61 s", None]


def test_an_engine_that_has_nothing_to_do_is_not_frozen(new_engine: Callable[..., Any]) -> None:
    made = new_engine()

    async def main() -> str | None:
        engine = AsyncEngine(made.core, made.clock, STALL_S)
        engine.start()
        await serve(engine, request("a", 8, 2))
        await engine.call(lambda _core: None)
        # Its thread is back at the queue once it takes the next command without one before it.
        while engine._thread._began_ns is not None:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)
        made.clock.advance_s(1e6)
        reason = engine.unavailable_because
        assert await engine.stop(0)
        return reason

    assert asyncio.run(main()) is None
