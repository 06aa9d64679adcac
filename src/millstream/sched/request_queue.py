"""Requests in the order in which they are to run.

The order is by arrival, moved by priority: one step of priority counts as much as `PRIORITY_SECONDS` of waiting.
So urgent requests overtake, and no request starves: after that long, nothing new of the next priority does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from millstream.request import Request, RequestStatus

PRIORITY_SECONDS = 10.0

Rank = tuple[float, float, str]
Size = tuple[int, int, Rank]


def rank(request: Request) -> Rank:
    """Lower runs first; a request keeps its rank for life, also when it is preempted."""
    return (
        request.arrival_time + PRIORITY_SECONDS * request.priority,
        request.arrival_time,
        request.request_id,
    )


def size(request: Request) -> Size:
    """Lower is shorter: what is left to schedule, among requests of the same priority."""
    return request.priority, request.num_new_tokens, rank(request)


def _waiting_size(request: Request) -> Size:
    # the same while it waits; unlike `size` it does not change when a cached prefix is found
    return request.priority, request.num_tokens, rank(request)


class RequestQueue:
    """Requests sorted by rank, or by another key that does not change while they are in it."""

    def __init__(self, key: Callable[[Request], Any] = rank) -> None:
        self._key = key
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._key)

    def first(self) -> Request:
        return self._requests[0]

    def last(self) -> Request:
        return self._requests[-1]

    def remove(self, request: Request) -> None:
        i = bisect_left(self._requests, self._key(request), key=self._key)
        assert i < len(self._requests) and self._requests[i] is request, f"{request.request_id} is not queued"
        del self._requests[i]


class WaitingQueue:
    """Requests that wait, in both orders: by rank and by size."""

    def __init__(self) -> None:
        self._by_rank = RequestQueue()
        self._by_size = RequestQueue(_waiting_size)

    def __len__(self) -> int:
        return len(self._by_rank)

    def add(self, request: Request) -> None:
        self._by_rank.add(request)
        self._by_size.add(request)

    def remove(self, request: Request) -> None:
        self._by_rank.remove(request)
        self._by_size.remove(request)

    def first(self) -> Request | None:
        """The first in rank."""
        return self._by_rank.first() if self._by_rank else None

    def shortest(self, count: int) -> list[Request]:
        """So many of them, shortest first."""
        return list(islice(self._by_size, count))


class Overtaking:
    """How far shorter requests may go past a first in rank for which there is no room in the KV cache.

    Together they may take as many blocks as it wants itself. After that nobody is admitted until those that run have
    ended and it fits, so it waits no longer than for twice its blocks.
    """

    def __init__(self) -> None:
        self._blocked: Request | None = None
        self._num_left = 0

    def block(self, request: Request, num_blocks: int) -> None:
        """This request is first in rank and wants so many blocks, which are not free."""
        if request is not self._blocked:
            self._blocked, self._num_left = request, num_blocks
        if request.status is RequestStatus.PREEMPTED:
            # those that run lack blocks: let nobody take more of them
            self._num_left = 0

    def may_take(self, num_blocks: int) -> bool:
        """Whether another request, which wants so many, may be admitted."""
        is_blocked = self._blocked is not None and not self._blocked.is_finished
        return not is_blocked or num_blocks <= self._num_left

    def admit(self, request: Request, num_blocks: int) -> None:
        """A request was admitted."""
        if request is self._blocked:
            self._blocked = None
        else:
            self._num_left -= num_blocks
