"""Case C.11's other half: sizes that are not offered are refused everywhere, with the list of those that are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cache_world import World, ids

from engine.cache_manager import CacheManager
from engine.clock import ManualClock
from engine.core import EngineCore
from engine.core_options import CoreOptions
from engine.core_stats import CoreStats
from engine.events import NullSink
from engine.tunable_state import Patch
from engine.tunables import default_values, parse_change

WRONG = [0, 1, -16, 8, 15, 17, 24, 48, 96, 127, 255, 257, 512, 1 << 40, 16.5, "48", "x", "", True, None, [16], {}]
LIST = "16, 32, 64, 128, 256"


def at_start(world: World, size: Any) -> None:
    CacheManager(
        world.cache.groups, world.cache.layout.total_bytes, {**default_values(), "block_size": size}, recent_tokens=32,
        sinks=16, watermark=0.0, clock=ManualClock(), events=NullSink(),
    )  # fmt: skip


def while_running(world: World, size: Any) -> None:
    world.scheduler.apply({**world.values, "block_size": size})


def from_a_client(_world: World, size: Any) -> None:
    parse_change("block_size", size)


@pytest.mark.parametrize("size", WRONG, ids=repr)
@pytest.mark.parametrize("act", [at_start, while_running, from_a_client])
def test_a_size_that_is_not_offered_is_refused_with_the_list(act: Callable[[World, Any], None], size: Any) -> None:
    """sgl-project/sglang#38196: at start, at actuation and in the declaration; what runs is as before."""
    world = World(values={"block_size": 64})
    request = world.add(ids(1, 100), max_tokens=5)
    world.step()
    before = world.sizes(request)
    with pytest.raises(ValueError, match=LIST):
        act(world, size)
    world.step()
    assert world.sizes(request) == before
    world.run(check=True)
    assert len(request.output_ids) == 5


@pytest.mark.parametrize("size", WRONG, ids=repr)
def test_the_core_answers_such_a_patch_and_changes_nothing(size: Any) -> None:
    """sgl-project/sglang#38196 at the control API's core, together with a change that would be fine alone."""
    world = World(values={"block_size": 64})
    core = EngineCore(
        world.scheduler, world.cache, None, world.values, world.clock, options=CoreOptions("m", "i", 4096),  # type: ignore[arg-type]
        stats=CoreStats(world.counters),
    )  # fmt: skip
    outcome = core.patch(Patch({"block_size": size, "kv_format": "int8"}, "test"))
    assert outcome.http_status == 422
    assert LIST in outcome.results["block_size"].why
    assert {result.status for result in outcome.results.values()} == {"rejected"}
    assert core.tunables_json()["effective"] == world.values
    assert outcome.revision == 0
