"""How busy the stages are, and how good the predictions, at /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from millstream.config import EngineConfig, SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.engine.metrics import EngineMetrics
from millstream.messages import EngineRequest, SchedulerOutput, SchedulerStats, WorkerInfo
from millstream.sim.executor import SimulatedExecutor, StepTimes, VirtualClock
from tests.fakes import params


def samples(metrics: EngineMetrics) -> dict[tuple[str, str], float]:
    """By name (without the prefix) and stage."""
    return {
        (sample.name.removeprefix("millstream:"), sample.labels.get("stage", "")): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if "le" not in sample.labels and "finished_reason" not in sample.labels
    }


def stats(step_seconds: float, stage_seconds: list[float], predicted: float = 0.0) -> SchedulerStats:
    return SchedulerStats(
        num_step_requests=1, step_seconds=step_seconds, stage_seconds=stage_seconds, predicted_seconds=predicted
    )


def test_busy_and_bubble_of_each_stage() -> None:
    metrics = EngineMetrics("m")
    metrics.step(stats(2.0, [1.0, 0.5]))
    metrics.step(stats(2.0, [2.0, 0.5]))
    found = samples(metrics)
    assert found["stage_busy_seconds_total", "0"] == 3.0
    assert found["stage_busy_seconds_total", "1"] == 1.0
    assert found["pipeline_active_seconds_total", ""] == 4.0
    assert found["stage_bubble_ratio", "0"] == 0.25
    assert found["stage_bubble_ratio", "1"] == 0.75


def test_predicted_against_measured() -> None:
    metrics = EngineMetrics("m")
    metrics.step(stats(9.0, [1.0, 4.0], predicted=3.0))
    metrics.step(stats(9.0, [2.0, 1.0], predicted=3.0))
    # executors that measure nothing tell nothing
    metrics.step(stats(9.0, [], predicted=3.0))
    found = samples(metrics)
    assert found["step_predicted_seconds_total", ""] == 6.0
    assert found["step_measured_seconds_total", ""] == 6.0
    assert found["step_prediction_ratio_count", ""] == 2
    assert found["step_prediction_ratio_sum", ""] == 3 / 4 + 3 / 2


def test_an_abort_between_steps_counts_nothing() -> None:
    metrics = EngineMetrics("m")
    metrics.step(SchedulerStats())
    found = samples(metrics)
    assert found["pipeline_active_seconds_total", ""] == 0
    assert ("stage_busy_seconds_total", "0") not in found


class Cost:
    num_stages = 2

    def __call__(self, step: SchedulerOutput) -> StepTimes:
        return StepTimes(host=0.0, stages=(0.25, 0.75), send=0.25, back=0.0)


def test_the_engine_tells_of_its_stages() -> None:
    info = WorkerInfo(100, 16, 200, 99, [], 0, 0, "float32", {})
    clock = VirtualClock(10.0)
    executor = SimulatedExecutor(info, Cost(), token_ids=[5], depth=2, clock=clock)
    core = EngineCore(
        EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=16, chunk_policy="fixed")), executor, clock=clock
    )
    core.add(EngineRequest("a", list(range(32)), params(1)))
    metrics = EngineMetrics("m")
    predictions = []
    while core.has_work:
        outputs = core.step()
        assert outputs is not None and outputs.stats is not None
        metrics.step(outputs.stats)
        predictions.append(outputs.stats.predicted_seconds)
    found = samples(metrics)
    # two chunks: the first lands at 1.25, the second, which waits for stage 1, at 2.0
    assert found["pipeline_active_seconds_total", ""] == 2.0
    assert found["stage_busy_seconds_total", "0"] == 0.5
    assert found["stage_busy_seconds_total", "1"] == 1.5
    assert found["stage_bubble_ratio", "1"] == 0.25
    assert found["step_predicted_seconds_total", ""] == sum(predictions) > 0
