"""Which stage counts as hung while the stages start: fake stages, a clock that is set by hand."""

from __future__ import annotations

import pytest

from millstream.executor.start_watch import StartWatch
from millstream.messages import FromWorker, StagePlan, StageProgress, StageReady, WorkerInfo

LIMIT = 10.0
INFO = WorkerInfo(1, 16, 16, 100, [], 0, 0, "float32", {})


class Stage:
    def __init__(self) -> None:
        self.used = 0.0

    def processor_seconds(self) -> float:
        return self.used


class Start:
    """Stages under a watch."""

    def __init__(self, num_stages: int) -> None:
        self.now = 100.0
        self.stages = [Stage() for _ in range(num_stages)]
        self.watch = StartWatch(self.stages, LIMIT, clock=lambda: self.now)

    def hear(self, *messages: FromWorker) -> None:
        for message in messages:
            self.watch.hear(message)

    def plan(self, *ranks: int) -> None:
        self.hear(*(StagePlan(rank, 1, 16) for rank in ranks))

    def load(self, *ranks: int, done: int = 8) -> None:
        self.hear(*(StageProgress(rank, done, 8) for rank in ranks))

    def ready(self, *ranks: int) -> None:
        self.hear(*(StageReady(rank, INFO) for rank in ranks))

    def let_pass(self, seconds: float, *, at_work: tuple[int, ...] = ()) -> int | None:
        """The stage that is found hung within that time, looking every second."""
        for _ in range(int(seconds)):
            self.now += 1
            for rank in at_work:
                self.stages[rank].used += 0.01
            if (found := self.watch.find_hung()) is not None:
                return found
        return None


def test_silence_is_found_after_the_limit_and_not_before() -> None:
    start = Start(2)
    assert start.let_pass(LIMIT) is None
    assert start.let_pass(1) == 0


def test_a_stage_that_imports_for_long_is_not_hung() -> None:
    start = Start(2)
    assert start.let_pass(100, at_work=(0, 1)) is None
    assert start.let_pass(LIMIT + 1, at_work=(0,)) == 1


def test_a_large_model_that_makes_progress_is_not_hung() -> None:
    start = Start(2)
    start.plan(0, 1)
    for done in range(8):
        assert start.let_pass(LIMIT) is None
        start.load(0, 1, done=done)
    assert start.let_pass(LIMIT + 1) == 0


def test_waiting_for_the_plans_of_others_is_no_silence() -> None:
    start = Start(3)
    start.plan(0, 2)
    assert start.let_pass(100, at_work=(1,)) is None
    assert start.let_pass(LIMIT + 1) == 1


def test_a_stage_stopped_while_it_waited_is_found_when_its_turn_comes() -> None:
    start = Start(2)
    start.plan(0)
    assert start.let_pass(100, at_work=(1,)) is None
    start.plan(1)
    start.load(1)
    assert start.let_pass(LIMIT + 1) == 0


def test_loaded_stages_wait_for_the_one_before() -> None:
    start = Start(3)
    start.plan(0, 1, 2)
    start.load(0, 2)
    assert start.let_pass(100, at_work=(0, 1)) is None
    start.ready(0)
    assert start.let_pass(LIMIT + 1) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_the_warm_up_is_watched(rank: int) -> None:
    start = Start(2)
    start.plan(0, 1)
    start.load(0, 1)
    start.ready(*range(rank))
    assert start.let_pass(LIMIT + 1) == rank


def test_who_was_stopped_itself_blames_nobody() -> None:
    start = Start(2)
    start.let_pass(5)
    start.now += 1000
    assert start.watch.find_hung() is None
    assert start.let_pass(LIMIT + 1) == 0
