"""Runs one step: make its tensors, run the model, sample, answer.

R requests of the step, T tokens, S of them sampled from, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream.messages import ModelRunnerOutput, PromptLogprobs, SchedulerOutput, TokenLogprobs
from millstream.worker.input_batch import InputBatch, StepInput
from millstream.worker.sampler import Sampled, Sampler, SamplingRow
from millstream.worker.step_graph import StepGraph

# logits of a whole chunk would be large: 512 tokens of a vocabulary of 150,000 in float32 are 300 MB
PROMPT_LOGPROB_ROWS = 64


class ModelRunner:
    """The model's graph, and the requests that it knows."""

    def __init__(self, *, graph: StepGraph, batch: InputBatch, sampler: Sampler, device: torch.device) -> None:
        self._graph = graph
        self._batch = batch
        self._sampler = sampler
        self._device = device

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._batch.apply(step)
        inputs = self._batch.make_input(step, self._device)
        hidden_TD = self._graph.forward(inputs.token_ids_T, inputs.tables)
        output = ModelRunnerOutput(step.step_id, [], [], logprobs={}, prompt_logprobs={})
        # before sampling: it appends tokens to the requests' known ones
        self._prompt_logprobs(step, inputs, hidden_TD, output)
        if inputs.sampled_rows:
            self._sample(step, inputs, hidden_TD, output)
        return output

    def _sample(self, step: SchedulerOutput, inputs: StepInput, hidden_TD: Tensor, output: ModelRunnerOutput) -> None:
        hidden_SD = hidden_TD[torch.from_numpy(inputs.last_token_S)]
        states = [inputs.states[i] for i in inputs.sampled_rows]
        rows = [
            SamplingRow(
                params=state.params,
                token_ids=self._batch.token_ids(state),
                num_prompt_tokens=state.num_prompt_tokens,
                stop_token_ids=state.stop_token_ids,
            )
            for state in states
        ]
        if all(row.is_plain for row in rows):
            sampled = [Sampled(token_id) for token_id in self._graph.argmax(hidden_SD)]
        else:
            sampled = self._sampler.sample(self._graph.logits(hidden_SD), rows)
        for i, state, chosen in zip(inputs.sampled_rows, states, sampled, strict=True):
            request_id = step.request_ids[i]
            self._batch.append_token(state, chosen.token_id)
            output.request_ids.append(request_id)
            output.new_token_ids.append([chosen.token_id])
            if chosen.logprobs is not None:
                output.logprobs[request_id] = [chosen.logprobs]

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
