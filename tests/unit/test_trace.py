"""`serve --trace` and `millstream trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.cli import main
from millstream.config import EngineConfig, SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.engine.trace import MAX_REQUESTS_NAMED, Tracer
from millstream.errors import ConfigError, InvalidRequestError
from millstream.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.sim.executor import SimulatedExecutor, StepTimes, VirtualClock
from millstream.sim.trace import read_trace, report, summarize
from tests.engine_thread import running_llm
from tests.fake_llm import FakeLLM, app_of, call
from tests.fakes import FakeExecutor, make_core, params
from tests.pipeline_helpers import Pipeline, engine_config, save_tiny_model


class Cost:
    num_stages = 2

    def __call__(self, step: SchedulerOutput) -> StepTimes:
        return StepTimes(host=0.0, stages=(0.25, 0.75), send=0.25, back=0.0)


def traced(path: Path, *, close: bool = True) -> None:
    """A prompt of two chunks through two stages of 0.25 s and 0.75 s, then 10 s of nothing, then one of one chunk."""
    info = WorkerInfo(100, 16, 200, 99, [], 0, 0, "float32", {})
    clock = VirtualClock(50.0)
    config = EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=16, chunk_policy="fixed"))
    core = EngineCore(config, SimulatedExecutor(info, Cost(), token_ids=[5], depth=2, clock=clock), clock=clock)
    core.tracer = Tracer(str(path), clock=clock)
    for name, length in (("a", 32), ("b", 16)):
        core.add(EngineRequest(name, [len(name)] * length, params(1)))
        while core.has_work:
            core.step()
        clock.advance_to(clock.now + 10)
    if close:
        core.tracer.close()
        core.tracer.close()


def spans(events: list[Any], category: str) -> list[tuple[int, int, float, float]]:
    """(process, step, begin, duration) in seconds."""
    return [(e["pid"], e["args"]["step"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e.get("cat") == category]


def test_what_each_stage_did(tmp_path: Path) -> None:
    traced(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())
    assert sorted(spans(events, "compute")) == [
        (0, 0, 0.0, 0.25),
        (0, 1, 0.25, 0.25),
        (0, 2, 12.0, 0.25),
        (1, 0, 0.5, 0.75),
        (1, 1, 1.25, 0.75),
        (1, 2, 12.5, 0.75),
    ]
    # stage 0 hands over before it begins anew in the simulation; stage 1 waits for its first step, not while idle
    assert spans(events, "send") == [(0, 0, 0.25, 0.25), (0, 1, 0.5, 0.25), (0, 2, 12.25, 0.25)]
    assert spans(events, "wait") == [(1, 0, 0.0, 0.5), (1, 2, 12.0, 0.5)]
    assert spans(events, "in flight") == [(2, 0, 0.0, 1.25), (2, 1, 0.0, 2.0), (2, 2, 12.0, 1.25)]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert sorted(names) == ["engine: steps in flight", "stage 0", "stage 1"]


def test_the_requests_and_chunks_of_a_step(tmp_path: Path) -> None:
    traced(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())
    [first] = [e for e in events if e.get("cat") == "compute" and e["pid"] == 1 and e["args"]["step"] == 1]
    assert first["args"] == {
        "step": 1,
        "tokens": 16,
        "rows": 1,
        "chunk_tokens": 16,
        "chunks": [{"request": "a", "start": 16, "tokens": 16}],
        "requests": ["a"],
    }


def test_many_requests_are_counted_not_named(tmp_path: Path) -> None:
    names = [f"r{i}" for i in range(100)]
    step = SchedulerOutput(0, [], [], names, [5] * 100, [1] * 99 + [7], [[]] * 100, [True] * 100)
    tracer = Tracer(str(tmp_path / "t.json"))
    tracer.step(step, ModelRunnerOutput(0, [], []), submitted=1.0, landed=2.0)
    tracer.close()
    [event] = [e for e in json.loads((tmp_path / "t.json").read_text()) if e["ph"] == "X"]
    assert event["args"]["requests"] == names[:MAX_REQUESTS_NAMED]
    assert event["args"]["chunks"] == [{"request": "r99", "start": 5, "tokens": 7}]
    assert (event["args"]["rows"], event["args"]["tokens"]) == (100, 106)


def test_no_file_without_the_setting_and_nothing_is_kept(tmp_path: Path) -> None:
    core = make_core(FakeExecutor())
    core.add(EngineRequest("a", [1, 2], params(3)))
    while core.has_work:
        core.step()
    assert core.tracer is None


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace is .*No such file"):
        Tracer(str(tmp_path / "none" / "t.json"))


def test_a_full_disk_ends_the_trace_only(caplog: pytest.LogCaptureFixture) -> None:
    step = SchedulerOutput(0, [], [], ["a"], [0], [1], [[]], [True])
    tracer = Tracer("/dev/full")
    for _ in range(3):
        tracer.step(step, ModelRunnerOutput(0, [], []), submitted=1.0, landed=2.0)
    tracer.close()
    assert [r.getMessage() for r in caplog.records] == ["The trace /dev/full ends here: No space left on device"]


# -- reading ----------------------------------------------------------------------------------------------------


def test_shares_and_stall(tmp_path: Path) -> None:
    traced(tmp_path / "t.json")
    trace = read_trace(str(tmp_path / "t.json"))
    assert (trace.num_steps, trace.num_stages) == (3, 2)
    assert [tuple(p) for p in trace.active] == [(0.0, 2.0), (12.0, 13.25)]
    first, second = summarize(trace)
    assert first.busy == pytest.approx(0.75 / 13.25)
    assert second.busy == pytest.approx(2.25 / 13.25)
    assert first.bubble == pytest.approx(1 - 0.75 / 3.25)
    assert second.bubble == pytest.approx(1 - 2.25 / 3.25)
    # the ten idle seconds are nobody's stall
    assert tuple(first.stall) == (0.5, 2.0)
    assert tuple(second.stall) == (0.0, 0.5)
    lines = report(trace)
    assert lines[0] == "3 steps on 2 stages in 13.250 s; a step was in the pipe for 3.250 s of them"
    assert "Longest stall: 1500.0 ms on stage 0, at 0.500 s" in lines
    assert lines[-1].startswith("stage 1 |")


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_the_trace_of_a_killed_server(tmp_path: Path, cut: int) -> None:
    traced(tmp_path / "whole.json")
    traced(tmp_path / "killed.json", close=False)
    data = (tmp_path / "killed.json").read_bytes()
    assert json.loads(data + b"]") == json.loads((tmp_path / "whole.json").read_bytes())
    (tmp_path / "killed.json").write_bytes(data[: len(data) - cut])
    trace = read_trace(str(tmp_path / "killed.json"))
    assert (trace.num_steps, trace.num_stages) == (3, 2)
    # what is lost is the engine's view of the last step; the stages' own is as good here
    assert summarize(trace) == summarize(read_trace(str(tmp_path / "whole.json")))


@pytest.mark.parametrize(
    "text", ["", "[]", "[\n", "hello", "{}", '[{"ph": 3}]', '[\n{"ph": "X"\n{"ph": "X"', '{"traceEvents": []}']
)
def test_what_is_no_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=r"t.json (is no trace|has no step)"):
        read_trace(str(tmp_path / "t.json"))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    traced(tmp_path / "t.json")
    picture = tmp_path / f"picture.{suffix}"
    assert main(["trace", str(tmp_path / "t.json"), "--plot", str(picture)]) == 0
    assert "Bubble share of all stages: 53.8%" in capsys.readouterr().out
    assert picture.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert main(["trace", str(tmp_path / "t.json"), "--plot", str(tmp_path / "picture.abc")]) == 2
    assert "picture.abc can't be written" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "none.json")]) == 2
    assert "none.json can't be read: No such file" in capsys.readouterr().err


def test_the_simulators_traces_are_read_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sim.json"
    flags = ["--model-card", "smollm2-135m", "--hardware", "instant", "--num-prompts", "4", "--trace", str(path)]
    assert main(["simulate", *flags, "--pipeline-parallel-size", "2"]) == 0
    capsys.readouterr()
    assert main(["trace", str(path)]) == 0
    assert "steps on 2 stages in" in capsys.readouterr().out


# -- real stages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2])
def test_times_of_real_stages_are_in_order(tmp_path: Path, num_stages: int) -> None:
    model = save_tiny_model(tmp_path / "model")
    pipeline = Pipeline(engine_config(model, pipeline_parallel_size=num_stages))
    try:
        core = pipeline.core(chunk=16, chunk_policy="fixed")
        core.tracer = Tracer(str(tmp_path / "t.json"))
        core.add(EngineRequest("a", [3 + i for i in range(60)], params(4)))
        while core.has_work:
            core.step()
        core.tracer.close()
    finally:
        pipeline.executor.shutdown()
    events = json.loads((tmp_path / "t.json").read_text())
    compute = spans(events, "compute")
    # four chunks, the last of which samples, then three decodes
    assert sorted(step - compute[0][1] for pid, step, _, _ in compute if pid == num_stages - 1) == list(range(7))
    flights = {step: (start, start + seconds) for _, step, start, seconds in spans(events, "in flight")}
    ends: dict[int, float] = {}
    for pid, step, start, seconds in sorted(compute, key=lambda c: (c[1], c[0])):
        assert flights[step][0] <= start + 1e-6
        assert start + seconds <= flights[step][1] + 1e-6
        # after the stage before on this step, and after this stage's step before
        assert start >= max(ends.get(pid - 1, 0.0) if pid else 0.0, ends.get(pid, 0.0)) - 1e-6
        ends[pid] = start + seconds
    assert len(spans(events, "send")) == 7 * (num_stages - 1)
    trace = read_trace(str(tmp_path / "t.json"))
    assert trace.num_stages == num_stages
    assert all(0 < s.busy <= 1 and 0 <= s.bubble < 1 for s in summarize(trace))


# -- on demand --------------------------------------------------------------------------------------------------


async def test_debug_routes_are_off_by_default() -> None:
    for path in ("/debug/trace/start", "/debug/trace/stop"):
        assert (await call(app_of(FakeLLM()), path)).status == 404


async def test_debug_routes() -> None:
    app = app_of(FakeLLM(), enable_debug=True, api_key="k")
    assert (await call(app, "/debug/trace/start")).status == 401
    headers = {"authorization": "Bearer k"}
    reply = await call(app, "/debug/trace/stop", headers=headers)
    assert (reply.status, reply.error["message"]) == (400, "No trace is being written")
    reply = await call(app, "/debug/trace/start", headers=headers)
    assert (reply.status, reply.json) == (200, {"file": "somewhere"})
    assert (await call(app, "/debug/trace/start", headers=headers)).status == 400
    reply = await call(app, "/debug/trace/stop", headers=headers)
    assert (reply.status, reply.json) == (200, {"file": "somewhere"})


async def test_a_trace_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with running_llm(FakeExecutor()) as running:

        async def answer(name: str) -> None:
            async for _ in running.llm.generate([1, 2], params(3), request_id=name):
                pass

        await answer("before")
        with pytest.raises(InvalidRequestError, match="No trace"):
            await running.llm.stop_trace()
        path = Path(await running.llm.start_trace())
        assert path.stat().st_mode & 0o077 == 0
        with pytest.raises(InvalidRequestError, match="already"):
            await running.llm.start_trace()
        await answer("during")
        assert await running.llm.stop_trace() == str(path)
        # the engine takes messages in order, so the trace has ended when this one has
        await answer("after")
        again = Path(await running.llm.start_trace())
        await answer("again")
    # the end of the engine ends the second
    for file, name in ((path, "during"), (again, "again")):
        events = json.loads(file.read_text())
        assert {r for e in events if e["ph"] == "X" for r in e["args"]["requests"]} == {name}
        assert len(spans(events, "in flight")) == 3
