"""The host tier as scheduler and core see it: by request, and with room counted in tokens. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from engine.arena import IntegrityError
from engine.block_pool import BlockPool
from engine.cache_recodes import RecodesFace
from engine.cache_sequence import CacheSequence, CacheSettings
from engine.host_tier import HostTier
from engine.memory_model import RESERVE_SLABS, GroupSpec, token_bytes
from engine.pool_block import HOST
from engine.request import Request
from engine.transfers import Transfer

_STREAM_SLACK_TOKENS = 64  # that a sequence which is going to be streamed can grow by at least


class OffloadFace(RecodesFace, ABC):
    """A part of :class:`engine.cache_manager.CacheManager`, whose books these are. Without a host it does nothing."""

    groups: tuple[GroupSpec, ...]
    _settings: CacheSettings
    _by_request: dict[str, CacheSequence]
    _pools: list[BlockPool]

    @abstractmethod
    def free(self, request: Request) -> None:
        """See :meth:`engine.cache_manager.CacheManager.free`."""

    @property
    def host(self) -> HostTier | None:
        """The host tier, if the engine has one."""
        return self._tier

    def is_parked(self, request: Request) -> bool:
        """Whether a preempted request has kept its KV."""
        sequence = self._by_request.get(request.request_id)
        return sequence is not None and sequence.is_parked

    def is_parked_here(self, request: Request) -> bool:
        """Whether a parked request has blocks on the device that only parked ones hold."""
        sequence = self._by_request.get(request.request_id)
        return self._tier is not None and sequence is not None and self._tier.is_parked_here(sequence)

    def should_park(self, request: Request) -> bool:
        """Whether a request that is preempted should keep its KV, in host memory, instead of computing it again."""
        sequence = self._by_request.get(request.request_id)
        return self._tier is not None and sequence is not None and self._tier.should_park(sequence)

    def park(self, request: Request) -> None:
        """A running request is preempted and keeps its KV; slots that nothing was computed for are given back."""
        sequence = self._by_request[request.request_id]
        if self._tier is None:
            raise IntegrityError("parking needs a host tier")
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            while len(table.blocks) > 1 and table.blocks[-1].first >= sequence.committed:
                pool.drop(table.pop(self._versions.next()), sequence.serial)
        sequence.end = sequence.committed
        sequence.capacity = min(table.capacity for table in sequence.tables)
        self._tier.park(sequence)

    def needs_load(self, request: Request) -> bool:
        """Whether a request holds blocks on the host, or would write to one that is being copied."""
        sequence = self._by_request.get(request.request_id)
        if self._tier is None or sequence is None:
            return False
        on_host = any(block.tier == HOST for table in sequence.tables for block in table.blocks)
        return on_host or not self._tier.is_loaded(sequence)

    def begin_load(self, request: Request, *, use_reserve: bool = False) -> bool:
        """Start bringing in what a request holds on the host, into room that is reserved now; False without it."""
        done = self._tier is not None and self._tier.begin_load(
            self._by_request[request.request_id], keep_slabs=0 if use_reserve else RESERVE_SLABS
        )
        self._dropped.tell_all()
        return done

    def begin_stream(self, request: Request, spare_tokens: int) -> bool:
        """Start bringing in the newest of what a parked request holds on the host, as far as ``spare_tokens`` that
        nobody else needs allow; the rest stays there and is streamed. False if the link is not good for that.
        """
        sequence = self._by_request[request.request_id]
        block_size = self._settings.block_size
        growth = max(0, request.num_tokens - sequence.capacity) + max(block_size, _STREAM_SLACK_TOKENS)
        spare = spare_tokens - -(-growth // block_size) * block_size
        if self._tier is None or spare < 0:
            return False
        room = [int(spare * token_bytes(group.shape)) for group in self.groups]
        return self._tier.begin_load(sequence, keep_slabs=RESERVE_SLABS, room=room)

    def press(self, request: Request, num_new_tokens: int, running: Iterable[Request]) -> bool:
        """Make room for a running request's tokens: of the first of ``running`` that the link is good for, old blocks
        go to the host, to be streamed from there. False if there is none; room appears when the copies are made.
        """
        if self._tier is None:
            return False
        sequence = self._by_request.get(request.request_id)
        end = request.num_computed_tokens + num_new_tokens
        missing = []
        for group, pool in enumerate(self._pools):
            needed = end - (sequence.tables[group].capacity if sequence is not None else 0)
            lack = needed - pool.room.available_tokens(self._recoders[group].targets.write_size())
            tokens = max(lack, _STREAM_SLACK_TOKENS) if lack > 0 else 0
            missing.append(int(tokens * token_bytes(self.groups[group].shape)))
        return any(missing) and any(
            self._tier.press(self._by_request[other.request_id], missing)
            for other in running
            if other.request_id in self._by_request
        )

    def press_bytes(self, request: Request, num_bytes: Sequence[int]) -> bool:
        """Let a running request have more of its oldest blocks on the host, worth so many bytes per group."""
        return self._tier is not None and self._tier.press(self._by_request[request.request_id], num_bytes)

    def note_streamed(self, num_bytes: int, wait_ns: int) -> None:
        """A step has attended so many bytes on the host, and computing has waited for them."""
        self.counters.host_streamed_bytes += num_bytes
        self.counters.host_stream_wait_ns += wait_ns
        if self._tier is not None:
            self._tier.cost.note_wait(wait_ns)

    def is_loaded(self, request: Request) -> bool:
        """Whether a loading request may run."""
        return self._tier is None or self._tier.is_loaded(self._by_request[request.request_id])

    def end_load(self, request: Request) -> tuple[bool, int]:
        """A loaded request runs from now on. Returns whether it was parked, and how many tokens came from the host."""
        if self._tier is None:
            return False, 0
        return self._tier.end_load(self._by_request[request.request_id])

    def stop_load(self, request: Request) -> None:
        """Give up loading: a parked request is parked again, another keeps nothing."""
        if self._tier is not None and not self._tier.stop_load(self._by_request[request.request_id]):
            self.free(request)

    def is_room_coming(self, request: Request, num_new_tokens: int) -> bool:
        """Whether copies to the host, under way or about to start, will make room for a running request's tokens."""
        if self._tier is None:
            return False
        sequence = self._by_request.get(request.request_id)
        end = request.num_computed_tokens + num_new_tokens
        comes = False
        for group, pool in enumerate(self._pools):
            needed = end - (sequence.tables[group].capacity if sequence is not None else 0)
            room = pool.room.available_tokens(self._recoders[group].targets.write_size())
            if room >= needed:
                continue
            coming = self._tier.coming_bytes(group) / token_bytes(self.groups[group].shape)
            if room + coming < needed:
                return False
            comes = True
        return comes

    def plan_transfers(self) -> tuple[Transfer, ...]:
        """Copies between the tiers to start now; every one goes to ``finish_transfers`` or ``cancel_transfers``."""
        return self._tier.plan() if self._tier is not None else ()

    def finish_transfers(self, numbers: Iterable[int]) -> None:
        """These copies have been made: swap the blocks under all holders."""
        if self._tier is not None:
            self._tier.finish(numbers)

    def cancel_transfers(self, numbers: Iterable[int]) -> list[str]:
        """These copies could not be made. Returns the ids of loading requests that wait for them in vain."""
        if self._tier is None:
            return []
        return [sequence.request_id for sequence in self._tier.cancel(numbers)]

    @property
    def is_host_asleep(self) -> bool:
        """Whether there is nothing on the host, nor on its way, and nothing will go there before settings change."""
        return self._tier is None or self._tier.is_asleep

    def streams(self, request: Request) -> bool:
        """Whether a running request may attend blocks on the host."""
        sequence = self._by_request.get(request.request_id)
        return sequence is not None and sequence.streams

    @property
    def num_transfers(self) -> int:
        """Copies planned and neither finished nor cancelled."""
        return self._tier.num_in_flight if self._tier is not None else 0

    def stop_offload(self) -> None:
        """Copies fail: use the host no more until ``host_offload`` is switched on again."""
        if self._tier is not None:
            self._tier.set_enabled(False)

    def has_transfer_plans(self) -> bool:
        """Whether ``plan_transfers`` may find something without a further step."""
        return self._tier is not None and self._tier.has_plans()
