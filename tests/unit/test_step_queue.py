"""Whose turn it is among the steps of several decisions."""

from __future__ import annotations

from millstream.messages import SchedulerOutput
from millstream.worker.step_queue import StepQueue


def decision(step_id: int, wanted: dict[str, int], *, forget: tuple[str, ...] = ()) -> SchedulerOutput:
    names = list(wanted)
    return SchedulerOutput(
        step_id=step_id,
        forget_ids=list(forget),
        new_requests=[],
        request_ids=names,
        num_computed_tokens=[10 * (i + 1) for i in range(len(names))],
        num_scheduled_tokens=[3] * len(names),
        new_block_ids=[[1]] * len(names),
        num_sampled_tokens=list(wanted.values()),
        num_steps=max(1, *wanted.values()),
    )


def test_steps_that_follow_go_on_where_the_last_one_ended_with_rows_that_want_more() -> None:
    queue = StepQueue()
    queue.put(decision(0, {"a": 3, "b": 0, "c": 2}))
    first, second, third = (queue.take() for _ in range(3))
    assert first.num_scheduled_tokens == [3, 3, 3]
    assert (second.request_ids, second.num_computed_tokens) == (["a", "c"], [13, 33])
    assert (third.request_ids, third.num_computed_tokens) == (["a"], [14])
    assert second.num_scheduled_tokens == [1, 1] and second.new_block_ids == [[], []]
    assert [s.num_steps for s in (first, second, third)] == [3, 2, 1]
    assert len(queue) == 0


def test_decisions_alternate() -> None:
    queue = StepQueue()
    queue.put(decision(0, {"a": 3}))
    taken = [queue.take()]
    queue.put(decision(1, {"b": 2}))
    queue.put(decision(2, {"c": 1}))
    while queue:
        taken.append(queue.take())
    # what came while 0 was computed goes before its next step
    assert [s.step_id for s in taken] == [0, 1, 2, 0, 1, 0]


def test_what_takes_the_same_requests_further_goes_after_their_steps() -> None:
    queue = StepQueue()
    queue.put(decision(0, {"a": 2, "b": 1}))
    queue.take()
    queue.put(decision(1, {"d": 1}))
    queue.put(decision(2, {"c": 1, "a": 1}))
    assert [queue.take().step_id for _ in range(3)] == [1, 0, 2]


def test_a_later_stage_takes_the_step_that_it_is_told() -> None:
    queue = StepQueue()
    queue.put(decision(0, {"a": 2}))
    queue.put(decision(1, {"b": 1}))
    assert [queue.take(i).step_id for i in (0, 1)] == [0, 1]
    assert 0 in queue and 1 not in queue
    assert queue.take(0).num_computed_tokens == [13]


def test_a_forgotten_request_is_in_no_step_that_follows_and_each_step_has_its_turn() -> None:
    queue = StepQueue()
    queue.put(decision(0, {"a": 3, "b": 2}))
    queue.take()
    # "a" was preempted: it is back, under the same name, in a decision that has not begun
    queue.put(decision(1, {"c": 1}, forget=("a", "b")))
    queue.put(decision(2, {"a": 1}))
    taken = [queue.take() for _ in range(4)]
    assert [(s.step_id, s.request_ids) for s in taken] == [(1, ["c"]), (0, []), (2, ["a"]), (0, [])]
    assert len(queue) == 0


def test_the_next_step_is_certain_while_no_decision_has_begun() -> None:
    queue = StepQueue()
    assert queue.certain_step_id() is None
    queue.put(decision(0, {"a": 1}))
    queue.put(decision(1, {"b": 2}))
    queue.put(decision(2, {"c": 1}))
    assert queue.certain_step_id() == 0
    queue.take()
    assert queue.certain_step_id() == 1
    queue.take()
    # another stage may take 2 before or after the second step of 1: whichever had come by then
    assert queue.certain_step_id() is None
    queue.take(1)
    assert queue.certain_step_id() == 2
    queue.take()
    assert queue.certain_step_id() is None
