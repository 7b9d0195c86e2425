"""Random lives of the whole cache and scheduler, with bytes: nothing is lost, mixed up, leaked or stuck."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from cache_world import World, ids
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.admission import AdmissionError
from engine.request import FinishReason, RequestStatus

PROMPTS = [ids(seed, 700) for seed in range(3)]
FLOORS = [None, None, None, "native", "int8", "int4"]


class CacheMachine(RuleBasedStateMachine):
    """Requests with shared prefixes arrive, run, are cancelled; every knob is turned; the executor sometimes fails."""

    world: World

    @initialize(
        slabs=st.integers(3, 10),
        windows=st.sampled_from([(None,), (None,), (None, 64), (40,), (200,), (None, None)]),
        protects=st.booleans(),
        reports=st.sampled_from([True, True, False]),
        recent=st.sampled_from([0, 32, 64]),
        sync=st.booleans(),
        budget=st.sampled_from([0, 64, 300]),
        host_slabs=st.sampled_from([0, 1, 3, 12]),
        rate=st.sampled_from([3e4, 1e6, 1e7]),
        lag=st.integers(0, 5),
        staging=st.sampled_from([0, 8]),
    )
    def start(
        self,
        slabs: int,
        windows: tuple[int | None, ...],
        protects: bool,
        reports: bool,
        recent: int,
        sync: bool,
        budget: int,
        host_slabs: int,
        rate: float,
        lag: int,
        staging: int,
    ) -> None:
        self.world = World(
            num_slabs=slabs,
            windows=windows,
            lossiest=("native" if protects else None, *[None] * (len(windows) - 1)),
            reports_attention=reports,
            recent_tokens=recent,
            sync=sync,
            recode_tokens=budget,
            seed=slabs,
            values={"host_offload": "on" if host_slabs else "off"},
            host_slabs=host_slabs,
            link_bytes_per_s=rate,
            lag=lag,
            staging_slabs=staging,
        )
        self.added = 0
        self.saved: dict[str, Any] | None = None

    @rule(
        which=st.integers(0, 2),
        shared=st.integers(0, 600),
        own=st.integers(1, 80),
        max_tokens=st.integers(1, 150),
        floor=st.sampled_from(FLOORS),
        evictable=st.booleans(),
        cached=st.sampled_from([True, True, True, False]),
        salt=st.sampled_from(["", "", "s"]),
        ttl=st.sampled_from([None, None, 0.05, 1.0, 100.0]),
    )
    def add(self, which: int, shared: int, own: int, max_tokens: int, **policy: Any) -> None:
        prompt = PROMPTS[which][:shared] + ids(1000 + self.added, own)
        self.added += 1
        if not policy.get("cached", True):
            policy.pop("ttl", None)
        names = {
            "ttl": "prefix_ttl_s",
            "floor": "kv_format_floor",
            "evictable": "allow_eviction",
            "cached": "use_prefix_cache",
        }
        try:
            self.world.add(prompt, max_tokens, **{names.get(k, k): v for k, v in policy.items()})
        except AdmissionError as error:
            assert error.kind == "can_never_fit"  # noqa: PT017 - every other kind is a failure

    @rule(count=st.integers(2, 12), shared=st.integers(0, 120), max_tokens=st.integers(20, 150))
    def burst(self, count: int, shared: int, max_tokens: int) -> None:
        for _ in range(count):
            self.add(which=0, shared=shared, own=30, max_tokens=max_tokens)

    @rule(count=st.integers(1, 25))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(pick=st.integers(0, 50))
    def abort(self, pick: int) -> None:
        requests = [*self.world.scheduler.running, *self.world.scheduler.waiting]
        if requests:
            assert self.world.scheduler.abort(requests[pick % len(requests)].request_id) is not None

    @rule(pick=st.integers(0, 50), before=st.booleans())
    def abort_inside_a_step(self, pick: int, before: bool) -> None:
        scheduler = self.world.scheduler
        plan = scheduler.schedule()
        outputs = [] if before else self.world.run_plan(plan)
        requests = [*scheduler.running, *scheduler.waiting]
        if requests:
            scheduler.abort(requests[pick % len(requests)].request_id)
        self.world.cache.check_integrity()
        if before:
            outputs = self.world.run_plan(plan)
        self.world.finished += scheduler.update(plan, outputs)

    @rule(budget=st.sampled_from([16, 200, 5000]), finish=st.booleans())
    def recode_between_steps(self, budget: int, finish: bool) -> None:
        """As a caller does that keeps recodes out of its plans."""
        batches = self.world.cache.plan_recodes(budget)
        self.world.check()
        if finish:
            for batch in batches:
                self.world.arenas[batch.group].recode(batch)
            self.world.cache.finish_recodes(batches)
        else:
            self.world.cache.cancel_recodes(batches)

    @rule()
    def executor_fails(self) -> None:
        plan = self.world.scheduler.schedule()
        self.world.scheduler.cancel(plan)

    @rule(
        kv_format=st.sampled_from(["native", "int8", "k8v4", "int4"]),
        block_size=st.sampled_from([16, 32, 64, 128, 256]),
    )
    def switch_storage(self, kv_format: str, block_size: int) -> None:
        self.world.apply(kv_format=kv_format, block_size=block_size)

    @rule(block_size=st.sampled_from([16, 32, 64, 128, 256]))
    def switch_inside_a_step(self, block_size: int) -> None:
        plan = self.world.scheduler.schedule()
        outputs = self.world.run_plan(plan)
        self.world.apply(block_size=block_size, kv_format="native")
        self.world.finished += self.world.scheduler.update(plan, outputs)

    @rule(eviction=st.sampled_from(["none", "window", "heavy_hitter"]), keep=st.sampled_from([128, 256]))
    def switch_eviction(self, eviction: str, keep: int) -> None:
        self.world.apply(eviction=eviction, keep_tokens=keep)

    @rule(budget=st.sampled_from([64, 128, 512]), seqs=st.sampled_from([1, 2, 8, 64]))
    def switch_budgets(self, budget: int, seqs: int) -> None:
        self.world.apply(max_num_batched_tokens=budget, max_num_seqs=seqs)

    @rule(offload=st.sampled_from(["off", "on", "on"]))
    def switch_offload(self, offload: str) -> None:
        self.world.apply(host_offload=offload if self.world.host_slabs else "off")

    @rule()
    def copies_fail(self) -> None:
        pending, self.world.copier.pending = self.world.copier.pending, []
        for request_id in self.world.cache.cancel_transfers([transfer.number for _, transfer in pending]):
            self.world.scheduler.fail_load(request_id)

    @rule(policy=st.sampled_from(["lru", "lfu", "cost"]))
    def switch_prefix_policy(self, policy: str) -> None:
        cached = self.world.cache.usage().cached_bytes
        self.world.apply(prefix_eviction=policy)
        assert self.world.cache.usage().cached_bytes == cached

    @rule(seconds=st.sampled_from([0.1, 2.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.advance_s(seconds)
        self.world.cache.pins.expire()
        assert all(row["expires_in_s"] > 0 for row in self.world.cache.pins.to_json())

    @rule(pick=st.integers(0, 20), everything=st.booleans())
    def unpin(self, pick: int, everything: bool) -> None:
        pins = self.world.cache.pins
        rows = pins.to_json()
        if rows:
            assert pins.unpin(None if everything else rows[pick % len(rows)]["id"]) == (len(rows) if everything else 1)

    @rule(
        count=st.integers(1, 15),
        block_size=st.sampled_from([16, 32, 64, 128, 256]),
        kv_format=st.sampled_from(["native", "int8", "int4"]),
    )
    def go_on_twice(self, count: int, **changes: Any) -> None:
        """From one snapshot, with the same chance: the same events, tables, tokens and readings both times."""
        world, seen = self.world, []
        saved = world.save()
        for _ in range(2):
            world.go_back(saved)
            start = len(world.events.events)
            world.apply(**changes)
            for _ in range(count):
                world.step()
            world.check()
            seen.append((world.events.events[start:], world.picture()))
        assert seen[0] == seen[1]

    @rule()
    def save(self) -> None:
        self.saved = self.world.save()

    @rule()
    def go_back(self) -> None:
        """To where it was any number of operations ago."""
        if self.saved is not None:
            self.world.go_back(self.saved)

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            pins = self.world.cache.pins
            assert pins.max_bytes >= pins.num_bytes() >= sum(pins.idle_bytes())
            lives = self.world.cache.lives
            assert sum(lives.lifetime.counts) == sum(lives.idle.counts) == sum(lives.dropped.values())

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.apply(max_num_seqs=64)
        world.run(50_000)  # up to 500 requests on a pool for two or three: it may take long, but not for ever
        world.settle()
        world.check()
        assert not world.cache.num_transfers
        assert not world.scheduler.running
        assert not world.scheduler.waiting
        for request in world.finished:
            assert request.status is RequestStatus.FINISHED
            if request.finish_reason is FinishReason.LENGTH:
                assert len(request.output_ids) == request.params.max_tokens
        assert world.cache.usage().used_bytes == 0
        world.cache.drop_idle(host=True)
        assert world.cache.usage().cached_bytes == 0
        assert all(pool.host is None or not pool.host.blocks for pool in world.cache._pools)
        assert not world.cache._prefix.nodes
        assert world.cache.converged_fraction() == 1.0
        world.check()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
