"""The steps that a worker has yet to compute, in the order of their turn.

    decision A, for three steps      A0 ───────> A1 ───> A2
    decision B comes meanwhile           B0                      computed: A0 B0 A1 A2

When a step is done, its decision's next step goes to the end of the line: decisions alternate, and what comes while a
step is computed is next. But a decision that takes the same requests further stays behind them: it was made when all
but their last step had landed. The first stage chooses, the others follow its order.
"""

from __future__ import annotations

from collections import deque

from millstream.messages import SchedulerOutput


class StepQueue:
    """One step of each decision."""

    def __init__(self) -> None:
        self._line: deque[SchedulerOutput] = deque()
        """Of decisions that have begun, the step before the one whose turn it will be."""
        self._forgotten: dict[int, set[str]] = {}
        """By decision that has begun: requests that were forgotten since."""
        self._taken: SchedulerOutput | None = None
        """The step taken last, if others follow from it and are not in the line yet."""

    def __len__(self) -> int:
        return len(self._line) + (self._taken is not None)

    def __contains__(self, step_id: int) -> bool:
        is_taken = self._taken is not None and self._taken.step_id == step_id
        return is_taken or any(step.step_id == step_id for step in self._line)

    def certain_step_id(self) -> int | None:
        """The decision whose step is next whatever else comes, on every stage; None where it depends on when.

        While no decision has begun, those that have come are taken in the order in which they came.
        """
        return self._line[0].step_id if self._line and self._taken is None and not self._forgotten else None

    def put(self, step: SchedulerOutput) -> None:
        """Queue a decision's first step."""
        if self._taken is not None and not set(self._taken.request_ids).isdisjoint(step.request_ids):
            self._line_up()
        self._line.append(step)

    def take(self, step_id: int | None = None) -> SchedulerOutput:
        """The step to compute now, the one before being done: the first, or the one of this decision."""
        self._line_up()
        at = 0 if step_id is None else [step.step_id for step in self._line].index(step_id)
        step = self._line[at]
        del self._line[at]
        forgotten = self._forgotten.pop(step.step_id, None)
        if forgotten is not None:
            following = step.next_step(without=forgotten)
            assert following is not None, "a decision without a next step is not in the line"
            step = following
        # a decision that has not begun may bring one of them back
        for names in self._forgotten.values():
            names.update(step.forget_ids)
        if step.num_steps > 1:
            self._forgotten[step.step_id] = forgotten or set()
            self._taken = step
        return step

    def _line_up(self) -> None:
        if self._taken is not None:
            self._line.append(self._taken)
            self._taken = None
