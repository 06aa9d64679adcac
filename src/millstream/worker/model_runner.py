"""Runs one step: make its tensors, run the stage's part of the model, hand on or sample."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from millstream.messages import ModelRunnerOutput, SchedulerOutput
from millstream.worker.inlet import Inlet
from millstream.worker.input_batch import InputBatch
from millstream.worker.outlet import Outlet
from millstream.worker.step_graph import StepGraph


class ModelRunner:
    """The stage's graph, between where its rows come from and where its hidden states go."""

    def __init__(
        self, *, graph: StepGraph, batch: InputBatch, inlet: Inlet, outlet: Outlet, device: torch.device
    ) -> None:
        self._graph = graph
        self._batch = batch
        self._inlet = inlet
        self._outlet = outlet
        self._device = device

    def next_step_id(self) -> int | None:
        """The decision whose step must be next; waits to know it. None: any."""
        return self._inlet.next_step_id()

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput, on_compute: Callable[[], None]) -> ModelRunnerOutput | None:
        """What the step brought, from the last stage; None from the others. Calls `on_compute` before it computes."""
        self._batch.apply(step)
        self._inlet.prepare(step)
        inputs = self._batch.make_input(step, self._device)
        rows, times = self._inlet.take(step, inputs)
        on_compute()
        started = time.monotonic()
        # all its requests may have been forgotten; the stages after this one take their turn all the same
        hidden_TD = self._graph.forward(rows, inputs.tables) if step.request_ids else rows.new_zeros(0, 1)
        output = self._outlet.put(step, inputs, hidden_TD, times=times, started=started)
        # only now: a graph may have computed in the memory of its rows
        self._inlet.release()
        return output
