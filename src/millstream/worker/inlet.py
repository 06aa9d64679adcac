"""What a stage computes on: token ids on the first stage, hidden states on the others.

T tokens of the step, D model width.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from torch import Tensor

from millstream.messages import SchedulerOutput
from millstream.parallel.layout import StageTime
from millstream.parallel.links import HiddenReceiver, TokenReceiver
from millstream.worker.input_batch import InputBatch, SlotState, StepInput


class Arrived(NamedTuple):
    """Rows for the model, and when and how long the stages before computed on them."""

    rows: Tensor
    times: list[StageTime]


class Inlet(Protocol):
    """Where a step's rows come from."""

    def next_step_id(self) -> int | None:
        """Whose rows come next; waits for them. None where the stage chooses."""
        ...

    def prepare(self, step: SchedulerOutput) -> None:
        """Called once the batch has taken over the step's changes, before the step's tensors are made."""
        ...

    def take(self, step: SchedulerOutput, inputs: StepInput) -> Arrived:
        """The rows; waits for them."""
        ...

    def release(self) -> None:
        """The rows taken last are no longer needed."""
        ...


class KnownTokens:
    """A model in one piece: all token ids are in the batch, where sampling put them."""

    def next_step_id(self) -> int | None:
        return None

    def prepare(self, step: SchedulerOutput) -> None:
        pass

    def take(self, step: SchedulerOutput, inputs: StepInput) -> Arrived:
        return Arrived(inputs.token_ids_T, [])

    def release(self) -> None:
        pass


class ReturnedTokens(KnownTokens):
    """The first of several stages: the last one samples and sends the tokens here.

    The engine schedules a request's next token while the one before is in the making. It does so in the turn in which
    the token should have come by; where it has not, the stage waits for it.
    """

    def __init__(self, batch: InputBatch, tokens: TokenReceiver) -> None:
        self._batch = batch
        self._tokens = tokens
        self._expected: deque[tuple[int, list[tuple[str, SlotState]]]] = deque()
        """By step: whose tokens will come, in the order in which they will."""

    def prepare(self, step: SchedulerOutput) -> None:
        while self._expected and (self._tokens.is_ready() or self._lacks_tokens(step)):
            step_id, requests = self._expected.popleft()
            for (request_id, state), token_id in zip(requests, self._tokens.receive(step_id), strict=True):
                # dropped for those that were forgotten meanwhile, even if they are back under the same name
                if self._batch.is_current(request_id, state):
                    self._batch.append_token(state, token_id)

    def take(self, step: SchedulerOutput, inputs: StepInput) -> Arrived:
        if inputs.sampled_rows:
            rows = [(step.request_ids[i], inputs.states[i]) for i in inputs.sampled_rows]
            self._expected.append((step.step_id, rows))
        return super().take(step, inputs)

    def _lacks_tokens(self, step: SchedulerOutput) -> bool:
        rows = zip(step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
        return any(start + count > self._batch.state(request_id).num_tokens for request_id, start, count in rows)


class HiddenStates:
    """A stage that is not the first."""

    def __init__(self, hidden: HiddenReceiver) -> None:
        self._hidden = hidden

    def next_step_id(self) -> int | None:
        return self._hidden.next_step_id()

    def prepare(self, step: SchedulerOutput) -> None:
        pass

    def take(self, step: SchedulerOutput, inputs: StepInput) -> Arrived:
        return Arrived(*self._hidden.receive(step.step_id, step.num_tokens))

    def release(self) -> None:
        self._hidden.release()
