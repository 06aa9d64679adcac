"""How steps are timed on several stages: a fake executor that says how long each took."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from millstream.executor.base import OnProgress
from millstream.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.sim.calibrate import MIN_REPEATS, Probe, Prober

INFO = WorkerInfo(64, 16, 512, 100, [], 0, 0, "float32", {})


class Stages:
    """Two stages whose n-th step takes `seconds[n]`, at the last the last; the result comes when it is asked for."""

    depth = 2

    def __init__(self, seconds: list[tuple[float, float]]) -> None:
        self._seconds = seconds
        self.open: set[str] = set()
        self.max_open = 0
        self.forgotten_early: list[str] = []

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        return INFO

    def submit(self, step: SchedulerOutput) -> list[Future[ModelRunnerOutput]]:
        self.forgotten_early += [name for name in step.forget_ids if name in self.open]
        self.open |= set(step.request_ids)
        self.max_open = max(self.max_open, len(self.open))
        stages = self

        class Pending(Future[ModelRunnerOutput]):
            def result(self, timeout: float | None = None) -> ModelRunnerOutput:
                stages.open -= set(step.request_ids)
                seconds = stages._seconds[min(step.step_id, len(stages._seconds) - 1)]
                return ModelRunnerOutput(
                    step.step_id, [], [], {}, {}, stage_seconds=list(seconds), stage_send_seconds=[0.01, 0.0]
                )

        return [Pending()]

    def shutdown(self) -> None:
        pass


def test_seconds_of_several_stages_add_up() -> None:
    # the first steps fill the pipeline; of the others the mean counts
    stages = Stages([(9.0, 9.0), (9.0, 9.0), (0.2, 0.3), (0.4, 0.3), (0.1, 0.2)])
    assert Prober(stages, INFO).seconds(Probe(1, 8, 0)) == pytest.approx(0.51)


def test_all_stages_are_busy_and_nothing_is_forgotten_that_is_on_its_way() -> None:
    stages = Stages([(0.1, 0.1)])
    prober = Prober(stages, INFO)
    prober.seconds(Probe(1, 8, 0))
    prober.seconds(Probe(1, 16, 0))
    assert MIN_REPEATS >= 3
    assert stages.max_open == 3
    assert stages.forgotten_early == []
    assert stages.open == set()
