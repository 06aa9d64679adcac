"""Requests in the order in which they are to run.

The order is by arrival, moved by priority: one step of priority counts as much as `PRIORITY_SECONDS` of waiting.
So urgent requests overtake, and no request starves: after that long, nothing new of the next priority does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from millstream.request import Request

PRIORITY_SECONDS = 10.0

Rank = tuple[float, float, str]


def rank(request: Request) -> Rank:
    """Lower runs first; a request keeps its rank for life, also when it is preempted."""
    return (
        request.arrival_time + PRIORITY_SECONDS * request.priority,
        request.arrival_time,
        request.request_id,
    )


class RequestQueue:
    """Requests sorted by rank."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=rank)

    def first(self) -> Request:
        return self._requests[0]

    def last(self) -> Request:
        return self._requests[-1]

    def remove(self, request: Request) -> None:
        i = bisect_left(self._requests, rank(request), key=rank)
        assert i < len(self._requests) and self._requests[i] is request, f"{request.request_id} is not queued"
        del self._requests[i]
