"""Which stage has fallen silent while it starts. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from millstream.messages import FromWorker, StagePlan, StageProgress, StageReady

_LOOKS = 10
"""How often stages are looked at within the limit."""
_OVERSLEPT_SECONDS = 1.0


class Starting(Protocol):
    """A stage as seen from outside."""

    def processor_seconds(self) -> float:
        """What it has used so far."""
        ...


class StartWatch:
    """Tells which stage for `limit` seconds has sent nothing and used no processor time, waiting for no other.

        import ─StagePlan─> [ all plans ] ─> weights ─StageProgress ...─> [ the stage before ] ─> warm-up ─StageReady─>

    In brackets: what a stage waits for, which may take any time. Processor time counts because importing and large
    tensors give no news for seconds; so a stage that computes for ever is not found.
    """

    def __init__(
        self, stages: Sequence[Starting], limit: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stages = stages
        self._limit = limit
        self._clock = clock
        self._planned: set[int] = set()
        self._loaded: set[int] = set()
        self._ready: set[int] = set()
        self._alive = [clock()] * len(stages)
        self._processor_seconds = [0.0] * len(stages)
        self._looked = clock()

    @property
    def interval(self) -> float:
        """Seconds from one `find_hung` to the next, at most."""
        return self._limit / _LOOKS

    def hear(self, message: FromWorker) -> None:
        """Take note of a message."""
        match message:
            case StagePlan(rank):
                self._planned.add(rank)
            case StageProgress(rank, done, total):
                if done == total:
                    self._loaded.add(rank)
            case StageReady(rank):
                self._ready.add(rank)
            case _:
                return
        self._alive[rank] = self._clock()

    def find_hung(self) -> int | None:
        """The rank of the first stage that has been silent for too long."""
        now = self._clock()
        # who comes late was stopped itself, and the stages likely too
        was_stopped = now - self._looked > self.interval + _OVERSLEPT_SECONDS
        self._looked = now
        for rank, stage in enumerate(self._stages):
            used = stage.processor_seconds()
            if was_stopped or self._waits(rank) or used > self._processor_seconds[rank]:
                self._alive[rank] = now
            self._processor_seconds[rank] = used
        return next((rank for rank, alive in enumerate(self._alive) if now - alive > self._limit), None)

    def _waits(self, rank: int) -> bool:
        """Whether a stage has nothing to do before others are as far."""
        if rank in self._ready:
            return True
        if rank in self._planned and len(self._planned) < len(self._stages):
            return True
        return rank in self._loaded and rank > 0 and rank - 1 not in self._ready
