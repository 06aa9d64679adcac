"""Stages that die, hang or raise, and starts that fail: an error that names the stage, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from millstream.errors import ConfigError, EngineDeadError, MillstreamError
from millstream.executor.base import Executor, make_executor
from millstream.executor.multiproc import MultiprocExecutor
from millstream.executor.stage_process import StageProcess
from millstream.executor.start_watch import StartWatch
from millstream.messages import SchedulerOutput, WorkerStart
from millstream.parallel.stage import Stage
from millstream.request import SamplingParams
from tests.pipeline_helpers import Pipeline, Session, engine_config, save_tiny_model


def children() -> set[int]:
    """Our processes, those that have ended but were not waited for included."""
    return {int(pid) for path in Path("/proc/self/task").iterdir() for pid in (path / "children").read_text().split()}


def open_files() -> set[str]:
    return {f"{p.name}: {os.readlink(p)}" for p in Path("/proc/self/fd").iterdir() if p.exists()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    processes, shared, files = children(), set(os.listdir("/dev/shm")), open_files()
    yield
    assert children() == processes
    assert list(folder.iterdir()) == []
    assert set(os.listdir("/dev/shm")) == shared
    assert len(open_files() - files) == 0


def pids(executor: Executor) -> list[int]:
    return sorted(children())[-executor.depth :]


def start_decoding(pipeline: Pipeline) -> Session:
    session = Session(pipeline.core())
    session.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    for _ in range(3):
        session.step()
    return session


def expect_death(pipeline: Pipeline, act: Callable[[], object], message: str) -> None:
    with pytest.raises(EngineDeadError, match=message):
        act()
    # and it stays dead
    with pytest.raises(EngineDeadError, match=message):
        pipeline.executor.submit(SchedulerOutput(9, [], [], [], [], [], [], []))
    pipeline.executor.shutdown()
    pipeline.executor.shutdown()


def judge_when(monkeypatch: pytest.MonkeyPatch, is_settled: Callable[[MultiprocExecutor], bool]) -> None:
    """Silence counts from the moment on that the stages which are well have done what they can: on a slow machine they
    would take the blame."""
    on_silence = MultiprocExecutor._on_silence

    def patient(self: MultiprocExecutor) -> None:
        if is_settled(self):
            on_silence(self)
        else:
            self._watch.restart()

    monkeypatch.setattr(MultiprocExecutor, "_on_silence", patient)


def judge_start_when(monkeypatch: pytest.MonkeyPatch, is_settled: Callable[[StartWatch], bool]) -> None:
    """The same while the stages start."""
    find_hung = StartWatch.find_hung

    def patient(self: StartWatch) -> int | None:
        if not is_settled(self):
            self._alive = [self._clock()] * len(self._alive)
        return find_hung(self)

    monkeypatch.setattr(StartWatch, "find_hung", patient)


def run_on(session: Session) -> None:
    while True:
        session.step()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_is_killed(model: Path, rank: int) -> None:
    pipeline = Pipeline(engine_config(model, pipeline_parallel_size=2))
    session = start_decoding(pipeline)
    os.kill(pids(pipeline.executor)[rank], signal.SIGKILL)
    layers = "0 to 1" if rank == 0 else "2 to 3"
    expect_death(pipeline, lambda: run_on(session), rf"Stage {rank} \(layers {layers}\) has ended \(signal 9\)")


def test_an_idle_stage_is_killed(model: Path) -> None:
    pipeline = Pipeline(engine_config(model, pipeline_parallel_size=2))
    os.kill(pids(pipeline.executor)[1], signal.SIGKILL)
    expect_death(pipeline, pipeline.executor.wait, r"Stage 1 .* has ended \(signal 9\)")  # type: ignore[attr-defined]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stage_hangs(
    model: Path, rank: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def others_are_ahead(executor: MultiprocExecutor) -> bool:
        assert executor._board is not None
        return all(executor._board.num_done(r) > executor._board.num_done(rank) for r in range(rank))

    judge_when(monkeypatch, others_are_ahead)
    pipeline = Pipeline(engine_config(model, pipeline_parallel_size=3, watchdog_timeout=1.0))
    session = start_decoding(pipeline)
    os.kill(pids(pipeline.executor)[rank], signal.SIGSTOP)
    expect_death(pipeline, lambda: run_on(session), rf"Stage {rank} .* hangs: no answer for 1 s \(--watchdog-timeout\)")
    shown = capfd.readouterr().err
    # the stack of the stopped stage, from the bottom on
    assert re.search(r"most recent call first.*worker/process\.py\", line \d+ in run_stage", shown, re.DOTALL)


def test_an_idle_stage_hangs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_when(monkeypatch, lambda executor: executor._silent in (set(), {1}))
    pipeline = Pipeline(engine_config(model, pipeline_parallel_size=2, watchdog_timeout=1.0))
    os.kill(pids(pipeline.executor)[1], signal.SIGSTOP)
    expect_death(pipeline, pipeline.executor.wait, "Stage 1 .* hangs")  # type: ignore[attr-defined]


def test_a_stage_raises(model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.log.log.propagate", True)
    pipeline = Pipeline(engine_config(model, pipeline_parallel_size=2))
    step = SchedulerOutput(0, [], [], ["nobody"], [0], [1], [[]], [1])
    (future,) = pipeline.executor.submit(step)
    expect_death(pipeline, future.result, r"Stage \d .* failed: KeyError: 'nobody'")
    assert "input_batch.py" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 5}, "--pipeline-parallel-size is 5: this model has 4 layers"),
        (
            {"pipeline_parallel_size": 2, "pipeline_layer_split": "2,3"},
            "--pipeline-layer-split is 2,3, 5 layers: this model has 4",
        ),
    ],
)
def test_a_bad_split(model: Path, settings: dict[str, object], message: str) -> None:
    executor = make_executor(engine_config(model, **settings))
    with pytest.raises(ConfigError, match=re.escape(message)):
        executor.start(lambda done, total: None)


def test_a_stage_that_can_not_start_says_why(model: Path) -> None:
    config = engine_config(model, pipeline_parallel_size=2)
    object.__setattr__(config.model, "max_model_len", 5000)
    executor = make_executor(config)
    with pytest.raises(MillstreamError, match="--max-model-len is 5000: this model's context holds 512") as caught:
        executor.start(lambda done, total: None)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_is_stopped_while_it_starts(model: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    init = StageProcess.__init__

    def stopped(self: StageProcess, start: WorkerStart, stage: Stage, *, inherited: Sequence[int]) -> None:
        init(self, start, stage, inherited=inherited)
        if start.rank == rank:
            os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(StageProcess, "__init__", stopped)
    judge_start_when(monkeypatch, lambda watch: watch._waits(1 - rank))
    executor = make_executor(engine_config(model, pipeline_parallel_size=2, watchdog_timeout=1.0))
    with pytest.raises(EngineDeadError, match=rf"Stage {rank} .* hangs: no answer for 1 s \(--watchdog-timeout\)"):
        executor.start(lambda done, total: None)


def test_a_stage_hangs_while_it_loads(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # opening a pipe that nobody writes to takes for ever
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    os.mkfifo(tmp_path / "model.safetensors")
    executor = make_executor(engine_config(tmp_path, pipeline_parallel_size=2, watchdog_timeout=2.0))
    judge_start_when(monkeypatch, lambda watch: watch._planned == {0, 1})
    # both hang, and either may be the first
    with pytest.raises(EngineDeadError, match=r"Stage [01] \(layers (0 to 1|2 to 3)\) hangs: no answer for 2 s"):
        executor.start(lambda done, total: None)
    assert re.search(
        r"most recent call first.*weights/checkpoint\.py\", line \d+ in", capfd.readouterr().err, re.DOTALL
    )


def test_two_pipelines_side_by_side(model: Path) -> None:
    config = engine_config(model, pipeline_parallel_size=2)
    pipelines = [Pipeline(config), Pipeline(config)]
    answers = []
    for pipeline in pipelines:
        session = Session(pipeline.core())
        session.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        answers.append(session.run())
    assert answers[0] == answers[1]
    for pipeline in pipelines:
        pipeline.executor.shutdown()


def test_the_start_tells_how_far_it_is_and_what_there_is(model: Path) -> None:
    told: list[tuple[int, int]] = []
    executor = make_executor(engine_config(model, pipeline_parallel_size=2, pipeline_layer_split="3,1"))
    info = executor.start(lambda done, total: told.append((done, total)))
    executor.shutdown()
    table, layer, norm = 160 * 64, 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 96 + 2 * 64, 64
    assert info.weight_bytes == 4 * (4 * layer + 2 * table + norm)  # both ends hold the tied table
    assert told[-1] == (info.weight_bytes, info.weight_bytes)
    # 0.004 GiB over 4 layers x 2 x 2 heads x 16 x 4 bytes x 16 tokens
    assert info.num_blocks == int(0.004 * 2**30) // (4 * 2 * 2 * 16 * 4 * 16)
    assert info.kv_cache_bytes == info.num_blocks * 4 * 2 * 2 * 16 * 4 * 16
