"""Where every request of a scheduler stands: waiting, loading, running or preempted. No torch."""

from __future__ import annotations

from collections import deque

from engine.request import Request, RequestStatus


class Queues:
    """The lists are kept in order of arrival, equal arrivals in the order they came; ``waiting`` in that of calls.

    ``requests``: all of them by id. ``lost``: by id, tokens that a request had computed and has to compute again.
    ``blocked_at``: room and running requests when the head last did not fit, None when it should be tried again.
    ``blocked_tokens``: the native room that it needed then, besides what active requests lacked.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.loading: list[Request] = []
        self.preempted: list[Request] = []
        self.waiting: deque[Request] = deque()  # never ran
        self.lost: dict[str, int] = {}
        self.blocked_at: tuple[int, int] | None = None
        self.blocked_tokens = 0

    @property
    def num_active(self) -> int:
        """Requests that have been admitted."""
        return len(self.running) + len(self.loading)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run."""
        return len(self.loading) + len(self.preempted) + len(self.waiting)

    def head(self) -> Request | None:
        """Who is admitted next: preempted requests before new ones."""
        if self.preempted:
            return self.preempted[0]
        return self.waiting[0] if self.waiting else None

    def take_head(self) -> None:
        """The head is admitted."""
        if self.preempted:
            del self.preempted[0]
        else:
            self.waiting.popleft()

    def run(self, request: Request) -> None:
        """An admitted request runs."""
        request.status = RequestStatus.RUNNING
        _insert(self.running, request)

    def load(self, request: Request) -> None:
        """An admitted request waits for KV."""
        request.status = RequestStatus.LOADING
        _insert(self.loading, request)

    def put_back(self, request: Request) -> None:
        """A request that was admitted is queued again, where it came from."""
        if request.num_preemptions:
            request.status = RequestStatus.PREEMPTED
            _insert(self.preempted, request)
        else:
            request.status = RequestStatus.WAITING
            self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """A request is over; its status still says where it stood."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.LOADING:
            self.loading.remove(request)
        elif request.status is RequestStatus.PREEMPTED:
            self.preempted.remove(request)
        else:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        self.lost.pop(request.request_id, None)
        self.blocked_at = None


def _insert(requests: list[Request], request: Request) -> None:
    index = len(requests)
    while index and requests[index - 1].arrival_ns > request.arrival_ns:
        index -= 1
    requests.insert(index, request)
