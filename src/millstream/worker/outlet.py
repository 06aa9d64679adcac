"""What becomes of a stage's hidden states: the last stage samples from them, the others hand them on.

T tokens of the step, S of them sampled from, D model width, V vocabulary.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from millstream.messages import ModelRunnerOutput, PromptLogprobs, SchedulerOutput, TokenLogprobs
from millstream.parallel.layout import StageTime
from millstream.parallel.links import HiddenSender, TokenSender
from millstream.worker.input_batch import InputBatch, SlotState, StepInput
from millstream.worker.sampler import Sampler, SamplingRow, is_plain
from millstream.worker.step_graph import StepGraph

# logits of a whole chunk would be large: 512 tokens of a vocabulary of 150,000 in float32 are 300 MB
PROMPT_LOGPROB_ROWS = 64


class Outlet(Protocol):
    """Where a step's hidden states go."""

    def put(
        self, step: SchedulerOutput, inputs: StepInput, hidden_TD: Tensor, *, times: list[StageTime], started: float
    ) -> ModelRunnerOutput | None:
        """Take a step's hidden states; what it brought, from the last stage.

        `times` are those of the stages before, `started` is when this one began (time.monotonic).
        """
        ...


class NextStage:
    """Hands on what a stage that is not the last has computed."""

    def __init__(self, hidden: HiddenSender) -> None:
        self._hidden = hidden

    def put(
        self, step: SchedulerOutput, inputs: StepInput, hidden_TD: Tensor, *, times: list[StageTime], started: float
    ) -> ModelRunnerOutput | None:
        self._hidden.send(step.step_id, hidden_TD, times, started=started)
        return None


class Head:
    """Logits and samples, of the rows that want them and of no others; `tokens` tells the first stage, if it is
    another process."""

    def __init__(
        self, *, graph: StepGraph, batch: InputBatch, sampler: Sampler, tokens: TokenSender | None = None
    ) -> None:
        self._graph = graph
        self._batch = batch
        self._sampler = sampler
        self._tokens = tokens

    def put(
        self, step: SchedulerOutput, inputs: StepInput, hidden_TD: Tensor, *, times: list[StageTime], started: float
    ) -> ModelRunnerOutput | None:
        output = ModelRunnerOutput(step.step_id, [], [], logprobs={}, prompt_logprobs={})
        # before sampling: it appends tokens to the requests' known ones
        self._prompt_logprobs(step, inputs, hidden_TD, output)
        if inputs.sampled_rows:
            self._sample(step, inputs, hidden_TD, output)
        times = [*times, StageTime(started, time.monotonic() - started, 0.0)]
        output.stage_started = [t.started for t in times]
        output.stage_seconds = [t.seconds for t in times]
        output.stage_send_seconds = [t.send_seconds for t in times]
        return output

    def _sample(self, step: SchedulerOutput, inputs: StepInput, hidden_TD: Tensor, output: ModelRunnerOutput) -> None:
        # in most steps every token is one to sample from
        is_all = len(inputs.sampled_rows) == len(hidden_TD)
        hidden_SD = hidden_TD if is_all else hidden_TD[torch.from_numpy(inputs.last_token_S)]
        states = [inputs.states[i] for i in inputs.sampled_rows]
        names = [step.request_ids[i] for i in inputs.sampled_rows]
        if all(is_plain(state.params, state.num_tokens - state.num_prompt_tokens) for state in states):
            token_ids = self._graph.argmax(hidden_SD)
        else:
            sampled = self._sampler.sample(self._graph.logits(hidden_SD), [self._row(state) for state in states])
            token_ids = [chosen.token_id for chosen in sampled]
            output.logprobs = {
                name: [chosen.logprobs]
                for name, chosen in zip(names, sampled, strict=True)
                if chosen.logprobs is not None
            }
        if self._tokens is not None:
            # before the engine learns of them, so that they are there when it schedules what follows
            self._tokens.send(step.step_id, token_ids)
        for state, token_id in zip(states, token_ids, strict=True):
            self._batch.append_token(state, token_id)
        output.request_ids = names
        output.new_token_ids = [[token_id] for token_id in token_ids]

    def _row(self, state: SlotState) -> SamplingRow:
        return SamplingRow(
            params=state.params,
            token_ids=self._batch.token_ids(state),
            num_prompt_tokens=state.num_prompt_tokens,
            stop_token_ids=state.stop_token_ids,
        )

    def _prompt_logprobs(
        self, step: SchedulerOutput, inputs: StepInput, hidden_TD: Tensor, output: ModelRunnerOutput
    ) -> None:
        """The token at position p is judged by the logits of position p - 1."""
        first = 0
        for i, state in enumerate(inputs.states):
            num_tokens, start = step.num_scheduled_tokens[i], step.num_computed_tokens[i]
            # a preempted request computes its prompt again and sends the same positions again
            count = min(num_tokens, state.num_prompt_tokens - 1 - start)
            if state.params.prompt_logprobs is not None and count > 0:
                found: list[TokenLogprobs] = []
                for at in range(0, count, PROMPT_LOGPROB_ROWS):
                    end = min(at + PROMPT_LOGPROB_ROWS, count)
                    targets = self._batch.token_ids(state)[start + at + 1 : start + end + 1]
                    logits_TV = self._graph.logits(hidden_TD[first + at : first + end])
                    found += self._sampler.prompt_logprobs(logits_TV, targets.tolist(), state.params.prompt_logprobs)
                output.prompt_logprobs[step.request_ids[i]] = PromptLogprobs(start + 1, found)
            first += num_tokens
