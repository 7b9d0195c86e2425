"""Prefix hits: what counts as one, after which change of settings, and that a hit never shows another's tokens."""

from __future__ import annotations

import random

import pytest
from cache_world import World, ids

from engine.formats import BlockClass
from engine.pool_block import Block
from engine.prefix_cache import PrefixCache
from engine.request import Request


def again(world: World, prompt: list[int], **policy: object) -> Request:
    """Send a prompt once more and let it end; it tells how much was a hit."""
    request = world.add(prompt, max_tokens=2, **policy)
    world.run(check=True)
    return request


def warm(world: World, prompt: list[int], **policy: object) -> None:
    again(world, prompt, **policy)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2])
def test_hits_are_whole_chunks_and_never_the_last_token(block_size: int, blocks: int, over: int) -> None:
    length = blocks * block_size + over
    world = World(values={"block_size": block_size})
    warm(world, ids(1, length))
    repeated = again(world, ids(1, length))
    assert repeated.num_cached_tokens == (length - 1) // 16 * 16
    assert len(repeated.output_ids) == 2
    longer = again(world, ids(1, length) + ids(2, 50))
    assert longer.num_cached_tokens == length // 16 * 16


def test_prompt_logprobs_compute_everything() -> None:
    """Case B.9: both runs see every prompt token computed, so both can report all of them."""
    for length in (15, 16, 17, 32, 33):
        world = World()
        for _ in range(2):
            request = again(world, ids(1, length), prompt_logprobs=0)
            assert request.num_cached_tokens == 0
        assert world.counters.prefix_cache_queries == 0
        assert world.counters.prefill_tokens_computed == 2 * length


def test_only_the_shared_part_is_a_hit() -> None:
    """Case B.10: A is long, B shares 40 tokens of it; B's table ends in A's block after 32, and A's tail is unseen."""
    world = World(values={"block_size": 64})
    a = ids(1, 200)
    warm(world, a)
    b = world.add(a[:40] + ids(2, 60), max_tokens=5)
    world.step()
    assert b.num_cached_tokens == 32
    assert [(entry[2], entry[3]) for entry in world.table(b)] == [(0, 32), (32, 32), (64, 36)]
    world.run(check=True)


def test_a_hit_holds_while_the_owner_goes_on_writing_in_the_block() -> None:
    world = World(values={"block_size": 256})
    a = world.add(ids(1, 100), max_tokens=100)
    world.step()
    b = world.add(ids(1, 100), max_tokens=100)
    for _ in range(40):
        world.step()
        world.check()
    assert b.num_cached_tokens == 96
    assert world.table(a)[0][1] == world.table(b)[0][1]
    world.scheduler.abort(a.request_id)  # nobody fills the block any more
    world.run(check=True)


@pytest.mark.parametrize("lossy", ["int8", "k8v4", "int4"])
def test_lossy_blocks_are_no_hit_after_the_format_went_back(lossy: str) -> None:
    """Case B.7: after the switch back, output must equal a cold run's, so everything is computed again."""
    world = World(values={"kv_format": lossy}, sync=True)
    warm(world, ids(1, 400))
    assert again(world, ids(1, 400)).num_cached_tokens == 384
    world.apply(kv_format="native")
    assert again(world, ids(1, 400)).num_cached_tokens == 0
    assert again(world, ids(1, 400)).num_cached_tokens == 384  # the native ones took their place


def test_native_blocks_computed_over_lossy_ones_are_no_hit_either() -> None:
    world = World(values={"kv_format": "int4"}, sync=True)
    first = world.add(ids(1, 200), max_tokens=100)
    for _ in range(20):
        world.step()
    world.apply(kv_format="native")
    for _ in range(80):
        world.step()  # stored native from here on, but over int4
    assert first.output_ids
    again(world, first.all_ids[:200])  # the first 192 tokens are cached natively now, and computed over native
    follow = again(world, first.all_ids[:280])
    assert follow.num_cached_tokens == 192
    assert again(world, first.all_ids[:280]).num_cached_tokens == 272


def test_what_is_computed_over_a_lossy_hit_is_marked_too() -> None:
    world = World(values={"kv_format": "int8"}, sync=True)
    warm(world, ids(1, 192) + [1] * 40)
    second = world.add(ids(1, 192) + ids(2, 32), max_tokens=5)
    world.step()
    assert second.num_cached_tokens == 192
    assert {kind for kind, _, first, _ in world.table(second) if first >= 192} == {"native"}
    world.scheduler.abort(second.request_id)
    world.apply(kv_format="native")
    again(world, [*ids(1, 192), 1])
    assert again(world, ids(1, 192) + ids(2, 32) + [1]).num_cached_tokens == 192


def test_a_block_reached_in_its_middle_serves_its_start_as_well() -> None:
    known = list(range(64))

    def runs(*chunks: tuple[Block, int]) -> list[tuple[Block, int]]:
        """Enter (block, ancestry) of each chunk; what a match then takes."""
        prefix = PrefixCache([None])
        node = prefix.root("")
        for index, (block, ancestry) in enumerate(chunks):
            node = prefix.child(node, known[16 * index : 16 * index + 16])
            prefix.put(node, 0, block, 16 * index, ancestry)
        match = prefix.match(known, "", 1)
        assert match.num_tokens == 64
        assert match.lossiness == max(max(ancestry, block.block_class.lossiness) for block, ancestry in chunks)
        return match.runs[0]

    wide, narrow = Block(0, BlockClass("native", 64), 0), Block(16, BlockClass("native", 32), 32)
    assert runs((wide, 0), (wide, 0), (wide, 0), (narrow, 0)) == [(wide, 32), (narrow, 64)]
    lossy = Block(48, BlockClass("int8", 64), 0)
    assert runs((wide, 0), (wide, 0), (lossy, 1), (lossy, 1)) == [(lossy, 64)]


def test_milder_blocks_are_a_hit_and_are_then_converted() -> None:
    world = World(sync=False, recode_tokens=0)
    warm(world, ids(1, 400))
    world.apply(kv_format="int8")
    request = world.add(ids(1, 400), max_tokens=50)
    world.step()
    assert request.num_cached_tokens == 384
    while batches := world.cache.plan_recodes(512):
        world.arenas[0].recode(batches[0])
        world.cache.finish_recodes(batches)
    assert [kind for kind, _, first, _ in world.table(request) if first < 352] == ["int8"] * 11


@pytest.mark.parametrize("change", [{"block_size": 128}, {"eviction": "window", "keep_tokens": 128}])
def test_other_switches_lose_no_hits(change: dict[str, object]) -> None:
    world = World()
    warm(world, ids(1, 200))
    world.apply(**change)
    assert again(world, ids(1, 200)).num_cached_tokens == 192


def test_floor_salt_and_opting_out() -> None:
    world = World(values={"kv_format": "int8"}, sync=True)
    prompt = ids(1, 400)
    warm(world, prompt)
    assert again(world, prompt, salt="other").num_cached_tokens == 0
    assert again(world, prompt, use_prefix_cache=False).num_cached_tokens == 0
    assert again(world, prompt, kv_format_floor="int8").num_cached_tokens == 384
    assert again(world, prompt, kv_format_floor="native").num_cached_tokens == 0
    assert again(world, prompt, salt="other").num_cached_tokens == 384


def test_a_request_that_opts_out_leaves_nothing_behind() -> None:
    world = World()
    warm(world, ids(1, 100), use_prefix_cache=False)
    assert world.cache.usage().cached_bytes == 0
    assert not world.cache._prefix.nodes


def test_tokens_generated_after_an_eviction_are_not_cached() -> None:
    world = World(values={"eviction": "window", "keep_tokens": 128}, num_slabs=12)
    first = world.add(ids(1, 300), max_tokens=100)
    world.run(check=True)
    assert first.num_evicted_tokens > 0
    follow = again(world, first.all_ids + ids(2, 20))
    assert 272 <= follow.num_cached_tokens <= 304  # the prompt, and what came before the first eviction
    assert again(world, first.all_ids[304:]).num_cached_tokens == 0  # nor as if they were a beginning


def test_two_that_compute_the_same_at_once_share_from_then_on() -> None:
    world = World()
    one, two = world.add(ids(1, 100), max_tokens=40), world.add(ids(1, 100), max_tokens=40)
    world.step()
    assert (one.num_cached_tokens, two.num_cached_tokens) == (0, 0)
    world.run(check=True)
    assert again(world, ids(1, 100)).num_cached_tokens == 96
    assert len(world.cache._pools[0].idle) < 30  # the second copy was not kept


@pytest.mark.parametrize("window", [40, 64, 100])
def test_a_hit_holds_in_every_group(window: int) -> None:
    world = World(windows=(None, window), num_slabs=10)
    first = world.add(ids(1, 300), max_tokens=2)
    world.step()
    assert world.table(first, 1)[0][2] + 16 > 300 - window  # the window group has let go of the rest
    world.run(check=True)
    hit = world.add(ids(1, 300), max_tokens=30)
    world.step()
    assert hit.num_cached_tokens == 288
    assert world.table(hit, 0)[0][2] == 0
    assert world.table(hit, 1)[0][2] >= 288 - window - 16
    world.run(check=True)
    shorter = again(world, ids(1, 200))
    assert shorter.num_cached_tokens in (0, 192)  # only if the window's blocks before 192 are still there
    world.cache.check_integrity()


def test_windows_alone_need_only_their_last_tokens() -> None:
    world = World(windows=(40,), num_slabs=4)
    warm(world, ids(1, 500))
    hit = world.add(ids(1, 500), max_tokens=5)
    world.step()
    assert hit.num_cached_tokens == 496
    assert len(world.table(hit)) <= 4
    world.run(check=True)


def test_chain_is_exact_where_hashes_would_collide() -> None:
    """-1 and -2 hash alike in Python; the tokens themselves are compared."""
    prefix = PrefixCache([None])
    root = prefix.root("")
    assert hash((-1,) * 16) == hash((-2,) * 16)
    assert prefix.child(root, [-1] * 16) != prefix.child(root, [-2] * 16)
    assert prefix.child(root, [-1] * 16) == prefix.child(root, [-1] * 16)


def test_a_less_lossy_block_takes_the_place_of_a_lossier_one_and_not_the_other_way_round() -> None:
    prefix = PrefixCache([None])
    node = prefix.child(prefix.root(""), range(16))
    lossy, native = Block(0, BlockClass("int8", 32), 0), Block(9, BlockClass("native", 16), 0)
    assert prefix.put(node, 0, lossy, 0, 1) is None
    assert prefix.put(node, 0, Block(5, BlockClass("int4", 32), 0), 0, 0) is None
    assert prefix.put(node, 0, native, 0, 0) is lossy
    assert not lossy.nodes
    assert prefix.put(node, 0, lossy, 0, 0) is None
    assert prefix.match(list(range(16)), "", 0).num_tokens == 16


def test_match_equals_a_plain_search() -> None:
    """Against the definition: the longest prefix that was entered under that salt."""
    rng = random.Random(3)
    world = World(num_slabs=40, values={"max_num_batched_tokens": 2048})
    known: set[tuple[str, tuple[int, ...]]] = set()
    for _ in range(60):
        base = ids(rng.randrange(3), 150)
        prompt, salt = base[: rng.randrange(1, 150)] + ids(rng.randrange(100), rng.randrange(40)), rng.choice(["", "x"])
        request = world.request(prompt, 1, salt=salt)
        expected = max((n for n in range(16, len(prompt), 16) if (salt, tuple(prompt[:n])) in known), default=0)
        world.scheduler.add(request)
        world.run()
        assert request.num_cached_tokens == expected
        known |= {(salt, tuple(prompt[:n])) for n in range(16, len(prompt) + 1, 16)}
    world.check()
