"""What tells the prefix policies apart, what popularity counts, and starts that take their rest along."""

from __future__ import annotations

from typing import Any

import pytest
from cache_world import World, ids

from engine.formats import BlockClass
from engine.pool_block import Block
from engine.popularity import HALF_LIFE, REMEMBERED, Popularity
from engine.prefix_cache import PrefixCache
from engine.prefix_policy import Cost, Lru, make_policy, parity_tokens


def use(world: World, prompt: list[int], **policy: Any) -> int:
    request = world.add(prompt, 1, **policy)
    world.run(check=True)
    return request.num_cached_tokens


def cached(world: World, prompt: list[int]) -> int:
    """Tokens of a prompt that a hit would give now; changes nothing that a policy looks at."""
    return world.cache._prefix.match(prompt, "", 3).num_tokens


def scan(world: World, tokens: int, seed: int = 500) -> None:
    """Prompts that come once and never again."""
    for number in range(tokens // 100):
        use(world, ids(seed + number, 100))


# -- popularity -------------------------------------------------------------------------------------------------------


def test_uses_add_up_and_fade_with_turnovers() -> None:
    popularity = Popularity(10)
    score = popularity.raised(*popularity.raised(0.0, 0))
    assert score == (2.0, 0)
    for _ in range(int(10 * HALF_LIFE)):
        popularity.entered()
    assert popularity.faded(*score) == pytest.approx(1.0)
    assert popularity.raised(*score) == (pytest.approx(2.0), 40)


def test_what_is_gone_is_remembered_for_a_bounded_while() -> None:
    popularity = Popularity(4)
    for digest in range(REMEMBERED * 4 + 3):
        popularity.remember(digest, 1.0 + digest, 0)
    assert popularity.num_remembered == REMEMBERED * 4
    assert popularity.recall(0) == (0.0, 0)
    assert popularity.recall(5) == (6.0, 0)
    assert popularity.recall(5) == (0.0, 0)  # it is back, and counted where it is


def test_a_chunk_that_comes_back_brings_its_score_and_a_salt_keeps_it_apart() -> None:
    prefix = PrefixCache([None], Popularity(100))
    node = prefix.child(prefix.root("a"), range(16))
    for _ in range(3):
        prefix.use(node)
    prefix.retain(node)
    prefix.release(node)
    assert not prefix.nodes
    again = prefix.child(prefix.root("a"), range(16))
    assert prefix.nodes[again].score == 3.0
    assert prefix.nodes[prefix.child(prefix.root("b"), range(16))].score == 0.0
    assert prefix.nodes[prefix.child(again, range(16))].score == 0.0


def test_a_request_counts_once_however_often_it_is_tried_or_preempted() -> None:
    world = World(num_slabs=4, values={"prefix_eviction": "lfu"})
    use(world, ids(1, 160))
    node = world.cache._prefix._path(ids(1, 160), "")[0]
    state = world.cache._prefix.nodes[node]
    one = state.score
    request = world.request(ids(1, 160))
    for _ in range(5):  # an admission that fails: taken up and let go of
        assert world.cache.match_prefix(request) == 144
        world.cache.free(request)
    assert state.score == one
    world.add(ids(2, 400), max_tokens=250)
    youngest = world.add(ids(1, 160), max_tokens=300)
    world.step()
    twice = state.score
    assert one < twice <= one + 1
    world.run(check=True)
    assert youngest.num_preemptions > 0
    assert youngest.num_cached_tokens == 144
    assert state.score == twice


def test_what_is_computed_again_counts_once() -> None:
    world = World(num_slabs=4, values={"prefix_eviction": "lfu"})
    world.add(ids(2, 400), max_tokens=250)
    youngest = world.add(ids(1, 160), max_tokens=300)
    world.run(check=True)
    assert youngest.num_preemptions > 0
    assert youngest.num_recomputed_tokens > 100  # no hit: that had been given up meanwhile
    path = world.cache._prefix._path(ids(1, 160), "")
    assert len(path) == 10
    assert all(world.cache._prefix.nodes[node].score <= 1 for node in path)


# -- orders -----------------------------------------------------------------------------------------------------------


def test_lru_forgets_what_lfu_and_cost_keep() -> None:
    """A prefix used often survives prompts that come once, where the pool turns over between its uses."""
    kept = {}
    for policy in ("lru", "lfu", "cost"):
        world = World(num_slabs=6, values={"prefix_eviction": policy})
        for _ in range(6):
            use(world, ids(1, 161))
        scan(world, 1600)  # the pool holds 1,280
        kept[policy] = cached(world, ids(1, 161))
    assert kept["lru"] == 0
    assert kept["lfu"] == kept["cost"] == 160


@pytest.mark.parametrize("policy", ["lfu", "cost"])
def test_old_popularity_fades(policy: str) -> None:
    world = World(num_slabs=6, values={"prefix_eviction": policy})
    for _ in range(6):
        use(world, ids(1, 161))
    scan(world, 16_000)
    assert cached(world, ids(1, 161)) == 0


def test_lfu_knows_a_session_that_comes_back_after_it_was_given_up() -> None:
    world = World(num_slabs=6, values={"prefix_eviction": "lfu"})
    for _ in range(3):
        use(world, ids(1, 161))
    scan(world, 4_000)
    assert cached(world, ids(1, 161)) == 0
    use(world, ids(1, 161))
    use(world, ids(2, 161))
    scan(world, 1_300, seed=900)
    assert cached(world, ids(1, 161)) > cached(world, ids(2, 161)) == 0


def test_cost_counts_depth_and_bytes() -> None:
    prefix = PrefixCache([None, 64], Popularity(100))
    world = World()
    arena = world.cache._pools[0].arena
    cost = Cost(prefix, arena, None, parity_tokens=1000)

    def worth(block_class: BlockClass, depth: int, policy: Cost = cost, used: int = 1) -> float:
        """Priority of a block that begins at a depth and whose chunks were used so often."""
        block = Block(0, block_class, depth, filled=block_class.block_size)
        node = prefix.root(str(len(prefix.nodes)))
        prefix.nodes[node].position = depth - 16
        for position in range(depth, depth + block_class.block_size, 16):
            node = prefix.child(node, [position] * 16)
            for _ in range(used):
                prefix.use(node)
            block.nodes[position] = node
        return policy.priority(block)

    native, int4 = BlockClass("native", 64), BlockClass("int4", 64)
    assert worth(native, 0) < worth(native, 1024) < worth(int4, 1024)
    assert worth(native, 1024) == pytest.approx(worth(native, 0) * (2.056 / 1.032) ** 0.5)
    ratio = arena.block_bytes(native) / arena.block_bytes(int4)
    assert worth(int4, 0) == pytest.approx(worth(native, 0) * ratio**0.5)
    assert worth(BlockClass("native", 16), 0) == pytest.approx(worth(native, 0), rel=0.02)
    assert worth(native, 0, used=3) == pytest.approx(3 * worth(native, 0))
    windowed = Cost(prefix, arena, 64, parity_tokens=1000)
    assert worth(native, 1024, windowed) == worth(native, 2048, windowed)
    cost.gave_up(5.0)
    assert worth(native, 0) > 5.0


def test_half_empty_blocks_are_worth_less() -> None:
    prefix = PrefixCache([None], Popularity(100))
    cost = Cost(prefix, World().cache._pools[0].arena, None, 1000)
    node = prefix.child(prefix.root(""), range(16))
    prefix.use(node)
    full, sparse = Block(0, BlockClass("native", 16), 0), Block(0, BlockClass("native", 64), 0)
    for block in (full, sparse):
        block.nodes[0] = node
    assert cost.priority(sparse) == pytest.approx(cost.priority(full) / 4, rel=0.02)


def test_wrong_settings_are_refused() -> None:
    world = World()
    with pytest.raises(ValueError, match="lru, lfu, cost"):
        world.cache.apply({**world.values, "prefix_eviction": "fifo"})
    with pytest.raises(ValueError, match="lru, lfu, cost"):
        make_policy("fifo", world.cache._prefix, world.cache._pools[0].arena, None)
    with pytest.raises(ValueError, match="got 0"):
        make_policy("cost", world.cache._prefix, world.cache._pools[0].arena, None, 0)
    assert parity_tokens(4096) == 24576


def test_a_slab_goes_by_its_best_block_where_value_counts_and_by_its_oldest_under_lru() -> None:
    """Two slabs of small idle blocks, one with a hot block among cold ones; a large block is needed."""
    given = {}
    for policy in ("lru", "lfu"):
        world = World(num_slabs=3, values={"prefix_eviction": policy})  # two slabs for requests
        use(world, ids(1, 17))  # one block, the lowest of slab 0
        use(world, ids(2, 240))  # fills slab 0
        use(world, ids(3, 241))  # slab 1, but for what is left in slab 0
        for _ in range(4):
            use(world, ids(2, 33))
        world.apply(block_size=256)
        use(world, ids(9, 250), use_prefix_cache=False)
        given[policy] = [cached(world, ids(seed, 240)) for seed in (2, 3)]
    assert given["lru"][0] == 0  # ids(1) in its slab was the oldest of all
    assert given["lfu"][0] == 240 > given["lfu"][1]


# -- starts -----------------------------------------------------------------------------------------------------------


def test_what_follows_goes_with_its_start() -> None:
    prefix = PrefixCache([None, 32])
    node, nodes = prefix.root(""), []
    blocks = [[Block(100 * group + i, BlockClass("native", 16), 16 * i) for i in range(5)] for group in range(2)]
    for i in range(5):
        node = prefix.child(node, [i] * 16)
        nodes.append(node)
        for group in range(2):
            prefix.put(node, group, blocks[group][i], 16 * i, 0)
    prefix.check_integrity([])
    assert prefix.forget(blocks[1][1], 1) == []  # with a window, later ones serve without it
    assert prefix.forget(blocks[0][2], 0) == blocks[0][3:]
    assert [bool(block.nodes) for block in blocks[0]] == [True, True, False, False, False]
    prefix.check_integrity([])
    late = Block(300, BlockClass("native", 16), 64)
    assert prefix.put(nodes[4], 0, late, 64, 0) is None
    assert not late.nodes  # it could not be hit
    assert prefix.put(nodes[2], 0, blocks[0][2], 32, 0) is None
    assert blocks[0][2].nodes == {32: nodes[2]}


def test_integrity_sees_a_chunk_without_its_start() -> None:
    world = World()
    use(world, ids(1, 64))
    first = world.cache._prefix.nodes[world.cache._prefix._path(ids(1, 64), "")[0]]
    block, first.blocks[0] = first.blocks[0], None
    with pytest.raises(AssertionError, match="outlived"):
        world.cache._prefix.check_integrity([])
    first.blocks[0] = block
    world.check()


def test_lru_is_the_order_of_last_use() -> None:
    policy = Lru()
    old, new = Block(0, BlockClass("native", 16), 0, last_used=3), Block(1, BlockClass("native", 16), 0, last_used=9)
    policy.gave_up(policy.priority(new))
    assert policy.priority(old) < policy.priority(new) == 9
