"""Simulated runs: loads, arrivals, the client's view, determinism, the command."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from millstream.bench.arrivals import arrival_times
from millstream.bench.datasets import RandomShape, random_prompts
from millstream.bench.metrics import assign_chunk_tokens, compute
from millstream.bench.table import render
from millstream.config import ENV_PREFIX
from millstream.errors import ConfigError
from millstream.sim import command
from millstream.sim.load import Load
from millstream.sim.loop import Sample
from millstream.sim.options import SimOptions, add_arguments, from_args
from millstream.sim.report import sparkline
from millstream.sim.run import Outcome, make_setup, simulate
from millstream.sim.sweep import highest_good_rate, sweep

SMALL = [
    "--model-card=llama-3.1-8b",
    "--hardware=h100-sxm",
    "--num-prompts=20",
    "--request-rate=10",
    "--random-input-len=400",
    "--random-output-len=20",
    "--random-range-ratio=0.5",
    "--no-progress",
]


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return parser.parse_args([*SMALL, *flags])


def options(*flags: str, env: dict[str, str] | None = None) -> SimOptions:
    return from_args(parse(*flags), env or {})


def outcome(*flags: str) -> Outcome:
    chosen = options(*flags)
    return simulate(make_setup(chosen), chosen.load, replay=chosen.replay)


def table(result: Outcome) -> str:
    return render(result.report.metrics, sections=("ttft", "tpot", "itl", "e2el"), percentiles=(99.0,))


# -- loads ---------------------------------------------------------------------------------------------------------


def test_the_load_is_the_one_that_bench_serve_sends() -> None:
    load = options("--random-prefix-len=30", "--seed=5").load
    arrivals = list(Load(load, vocab_size=50_000).arrivals())
    shape = RandomShape(input_len=400, output_len=20, range_ratio=0.5, prefix_len=30)
    sent = asyncio.run(random_prompts(shape, n=20, seed=5, counter=None, can_send_ids=True))
    assert [(len(a.prompt_token_ids), a.output_len) for a in arrivals] == [(p.prompt_len, p.output_len) for p in sent]
    assert [a.at for a in arrivals] == arrival_times(20, rate=10, seed=5)
    assert len({tuple(a.prompt_token_ids[:30]) for a in arrivals}) == 1
    assert len({tuple(a.prompt_token_ids[30:60]) for a in arrivals}) == 20
    assert all(0 <= t < 50_000 for a in arrivals for t in a.prompt_token_ids)


def test_lines_of_a_file_that_are_equal_get_equal_tokens(tmp_path: Path) -> None:
    path = tmp_path / "chat.txt"
    path.write_text("What is a mill?\nWho turns the wheel of the mill?\n")
    load = options("--dataset-name=chat", f"--dataset-path={path}", "--output-len=7", "--num-prompts=3").load
    first, second, third = Load(load, vocab_size=1000).arrivals()
    assert first.prompt_token_ids == third.prompt_token_ids != second.prompt_token_ids
    assert third.output_len == 7


def test_a_recorded_load_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    lines = [{"at": 2.5, "input_len": 30, "output_len": 3}, {"at": 0.0, "input_len": 20, "output_len": 2}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [f for f in SMALL if not f.startswith(("--num", "--request", "--random"))]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    chosen = from_args(parser.parse_args([*flags, f"--replay={path}"]), {})
    result = simulate(make_setup(chosen), chosen.load, replay=chosen.replay)
    records = result.report.records
    assert [(r.prompt_len, r.output_len) for r in records] == [(20, 2), (30, 3)]
    assert records[1].start - records[0].start == 2.5
    with pytest.raises(ConfigError, match="--random-input-len can't be given with --replay"):
        options(f"--replay={path}")
    path.write_text('{"at": 0, "input_len": 0, "output_len": 1}\n')
    with pytest.raises(ConfigError, match="line 1: at must be 0 or more, both lengths 1 or more"):
        simulate(make_setup(chosen), chosen.load, replay=chosen.replay)


@pytest.mark.parametrize(("name", "requests", "inputs"), [("000", 32, 314732), ("002", 16, 296), ("003", 1000, 215196)])
def test_the_seeds_loads_have_the_seeds_totals(name: str, requests: int, inputs: int) -> None:
    load = Load(options().load, vocab_size=1000, replay=f"seed-{name}")
    assert len(load) == requests
    assert sum(len(a.prompt_token_ids) for a in load.arrivals()) == inputs


# -- what the client sees ------------------------------------------------------------------------------------------


def test_answers_have_the_lengths_asked_for_and_times_in_order() -> None:
    result = outcome()
    asked = [a.output_len for a in Load(options().load, vocab_size=1000).arrivals()]
    assert [r.output_len for r in result.report.records] == asked
    for record in result.report.records:
        assert sum(record.chunk_tokens) == record.output_len == len(record.chunk_times)
        assert record.start < record.chunk_times[0] and record.chunk_times == sorted(record.chunk_times)
        assert record.finish_reason == "length" and record.end == record.chunk_times[-1]


def test_the_first_token_of_a_lonely_request_takes_what_its_parts_take() -> None:
    chosen = options("--num-prompts=1", "--random-range-ratio=0", "--set", "front_end_us=5000")
    setup = make_setup(chosen)
    record = simulate(setup, chosen.load).report.records[0]
    steps = -(-400 // 512)
    assert steps == 1
    layer = 400 * 2 * setup.cost.arch.num_parameters() / setup.cost.hardware.peak("bfloat16")
    assert 0.005 + layer < record.ttft < 0.005 + 3 * layer


def test_the_table_is_that_of_bench_serve_over_the_same_records() -> None:
    result = outcome()
    records = result.report.records
    for record in records:
        assign_chunk_tokens(record)
    assert compute(records) == result.report.metrics


def test_equal_settings_give_equal_tables_and_other_seeds_others() -> None:
    assert table(outcome()) == table(outcome())
    assert table(outcome()) != table(outcome("--seed=1"))


def test_a_stream_interval_joins_tokens_but_not_the_first() -> None:
    one, four = outcome(), outcome("--stream-interval=4")
    record = four.report.records[0]
    assert record.chunk_tokens[0] == 1
    assert set(record.chunk_tokens[1:-1]) == {4}
    assert sum(record.chunk_tokens) == record.output_len
    assert four.report.metrics.ttft == one.report.metrics.ttft
    assert four.report.metrics.e2el == one.report.metrics.e2el
    assert four.report.metrics.itl is not None and one.report.metrics.itl is not None
    assert four.report.metrics.itl.mean > 3 * one.report.metrics.itl.mean


def test_max_concurrency_holds_requests_back_in_the_client() -> None:
    result = outcome("--request-rate=inf", "--max-concurrency=2")
    events = [(r.start, 1) for r in result.report.records] + [(r.end, -1) for r in result.report.records]
    running = peak = 0
    for _, change in sorted(events, key=lambda e: (e[0], e[1])):
        running += change
        peak = max(peak, running)
    assert peak == 2
    assert result.report.metrics.client_wait is not None and result.report.metrics.client_wait.max > 0
    assert any("waited" in note for note in result.report.notes)


def test_a_full_queue_and_a_long_prompt_are_refused() -> None:
    result = outcome("--request-rate=inf", "--max-num-seqs=2", "--max-num-waiting=3")
    errors = [r.error for r in result.report.records if r.error is not None]
    assert len(errors) == 15 and set(errors) == {"429: the queue is full"}
    assert result.report.metrics.completed == 5
    with pytest.raises(ConfigError, match="no request could run; the first: 400: The prompt has"):
        outcome("--max-model-len=100")


def test_a_batch_window_lets_requests_start_together() -> None:
    def first_batch(*flags: str) -> int:
        return outcome("--request-rate=200", *flags).timeline.work[0].num_rows

    assert first_batch("--max-num-batched-tokens=8192") == 1
    assert first_batch("--max-num-batched-tokens=8192", "--batch-window-ms=50") > 3


def test_a_shared_prefix_is_computed_once() -> None:
    flags = ("--random-prefix-len=1600", "--random-input-len=32")
    cached, not_cached = outcome(*flags), outcome(*flags, "--no-enable-prefix-caching")
    assert cached.occupancy.num_prefix_hits >= 19 * 1600 * 0.9
    assert not_cached.occupancy.num_prefix_hits == 0
    assert cached.report.metrics.ttft is not None and not_cached.report.metrics.ttft is not None
    assert cached.report.metrics.ttft.mean < not_cached.report.metrics.ttft.mean / 2


def test_chunk_pipelining_brings_the_first_token_after_n_and_p_steps() -> None:
    """One prompt of n chunks over P equal stages: n * P stage-steps without, n + P - 1 with chunk pipelining."""
    flags = ("--num-prompts=1", "--random-input-len=8192", "--random-range-ratio=0", "--max-num-batched-tokens=512")
    flags += ("--pipeline-parallel-size=4", "--chunk-policy=fixed")
    before = outcome(*flags, "--no-chunk-pipelining").report.records[0].ttft
    after = outcome(*flags).report.records[0].ttft
    assert before / after == pytest.approx(16 * 4 / (16 + 3), rel=0.1)


def test_a_full_kv_cache_preempts_and_still_answers() -> None:
    result = outcome("--request-rate=inf", "--kv-cache-memory=0.25", "--random-output-len=400")
    assert result.occupancy.num_preemptions > 0
    assert result.report.metrics.completed == 20
    assert 0.9 < result.occupancy.max_kv_usage <= 1.0


# -- stages --------------------------------------------------------------------------------------------------------


def test_busy_shares_are_those_of_the_timeline() -> None:
    result = outcome("--pipeline-parallel-size=2", "--request-rate=inf")
    for stage, use in enumerate(result.stages):
        work = [w for w in result.timeline.work if w.stage == stage]
        assert use.busy == pytest.approx(sum(w.end - w.start for w in work) / result.report.metrics.duration)
        assert 0 <= use.bubble < 1
        assert all(a.end <= b.start for a, b in itertools.pairwise(work)), "one step at a time"
    assert sum(w.num_tokens for w in result.timeline.work if w.stage == 1) == sum(
        r.prompt_len + r.output_len - 1 for r in result.report.records
    )


def test_a_sparkline_keeps_the_peaks() -> None:
    samples = [Sample(0.0, 0.0, 0, 0), Sample(0.1, 1.0, 0, 0), Sample(0.2, 0.5, 0, 0), Sample(1.0, 0.0, 0, 0)]
    # the first span has the highest of its samples, spans without one go on as the one before ended
    assert sparkline(samples, 1.0, 4) == "███ "
    assert sparkline(samples[2:], 1.0, 4) == "▄▄▄ "


# -- sweeps --------------------------------------------------------------------------------------------------------


def test_a_sweep_finds_the_highest_good_rate() -> None:
    chosen = options("--num-prompts=60", "--goodput", "ttft:400", "tpot:40", "--sweep=request-rate=5:45:20")
    assert chosen.sweep is not None and chosen.sweep.rates == (5.0, 25.0, 45.0)
    points = list(sweep(make_setup(chosen), chosen.load, (5.0, 2000.0)))
    shares = [result.share_kept for _, result in points]
    assert shares[0] == 1.0 and shares[1] is not None and shares[1] < 0.9
    assert highest_good_rate(points, share=0.9) == 5.0
    assert highest_good_rate(points[1:], share=0.9) is None
    assert highest_good_rate([points[1], points[0]], share=0.9) is None, "what comes after a failure does not count"


@pytest.mark.parametrize("text", ["request-rate=1:2", "tpot=1:2:1", "request-rate=2:1:1", "request-rate=1:2:0", "x"])
def test_a_bad_sweep_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--sweep={text}")
    assert "--sweep" in capsys.readouterr().err


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model=x",), "either --model-card NAME or --model MODEL"),
        (("--plot=x.gif",), "must end in .png or .svg"),
        (("--num-warmups=2",), "--num-warmups changes nothing on a simulated device"),
        (("--temperature=0.5",), "--temperature changes nothing"),
        (('--extra-body={"a": 1}',), "--extra-body changes nothing"),
        (("--threads=2",), "--threads is for --calibrate"),
        (("--pipeline-parallel-size=33",), "--pipeline-parallel-size is 33: this model has 32 layers"),
        (("--pipeline-parallel-size=2", "--pipeline-layer-split=1,2"), "3 layers: this model has 32"),
        (("--hardware=rtx-4090", "--dtype=float32"), "its weights take 2"),
        (("--sweep=request-rate=1:2:1", "--trace=x"), "--trace is of one run"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_setup(options(*flags))


def test_the_schedulers_settings_are_flags_too() -> None:
    chosen = options("--num-scheduler-steps=8", "--no-async-scheduling", "--no-adaptive-steps", "--quantization=int8")
    scheduler = chosen.engine.scheduler
    assert (scheduler.num_scheduler_steps, scheduler.async_scheduling, scheduler.adaptive_steps) == (8, False, False)
    assert make_setup(chosen).info.weight_bytes < 0.6 * make_setup(options()).info.weight_bytes


def test_scheduling_ahead_hides_what_the_engine_does() -> None:
    flags = ("--num-prompts=1", "--random-range-ratio=0", "--random-output-len=50")
    flags += ("--set", "host_step_us=4000", "return_us=0")
    behind, ahead = outcome(*flags, "--no-async-scheduling"), outcome(*flags)
    assert behind.report.metrics.tpot is not None and ahead.report.metrics.tpot is not None
    # 4 ms and a row of 3 us
    assert behind.report.metrics.tpot.mean - ahead.report.metrics.tpot.mean == pytest.approx(4.003)
    blocks = outcome(*flags, "--no-async-scheduling", "--num-scheduler-steps=7")
    assert blocks.report.metrics.tpot is not None
    # within a block it is hidden too: of 49 gaps 7 have it
    assert behind.report.metrics.tpot.mean - blocks.report.metrics.tpot.mean == pytest.approx(4.003 * 6 / 7)


def test_settings_come_from_variables_and_files_too(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("max-num-seqs: 7\nblock-size: 16\n")
    chosen = options(f"--config={path}", "--block-size=64", env={ENV_PREFIX + "MAX_NUM_BATCHED_TOKENS": "99"})
    assert chosen.engine.scheduler.max_num_seqs == 7
    assert chosen.engine.cache.block_size == 64
    assert chosen.engine.scheduler.max_num_batched_tokens == 99
    path.write_text("max-num-cats: 7\n")
    with pytest.raises(ConfigError, match="max-num-cats"):
        options(f"--config={path}")


def test_the_command_prints_the_table_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--pipeline-parallel-size=2", f"--trace={tmp_path / 'trace.json'}", f"--plot={tmp_path / 'plot.svg'}")
    saved = ("--save-result", f"--result-dir={tmp_path}", "--result-filename=result.json")
    assert command.run(parse(*flags, *saved)) == 0
    out = capsys.readouterr().out
    assert "Serving Benchmark Result" in out and "Successful requests:                     20" in out
    assert "llama-3.1-8b (bfloat16) on 2 x h100-sxm" in out and "joined by NVLink 4" in out
    assert "stage 1 |" in out and "preemptions" in out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in steps} == {0, 1}
    assert all(e["dur"] > 0 and e["args"]["rows"] == len(e["args"]["requests"]) for e in steps)
    assert ElementTree.parse(tmp_path / "plot.svg").getroot().tag.endswith("svg")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["backend"], result["completed"], result["ignore_eos"]) == ("simulated", 20, True)


def test_the_command_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "sweep.svg"
    saved = ("--save-result", f"--result-dir={tmp_path}", "--result-filename=r.json")
    assert command.run(parse("--sweep=request-rate=4:8:4", "--goodput", "ttft:9999", f"--plot={plot}", *saved)) == 0
    out = capsys.readouterr().out
    assert "Highest rate at which 90% of the requests keep ttft <= 9999 ms: 8 requests/s" in out
    assert plot.is_file()
    assert json.loads((tmp_path / "r-4qps.json").read_text())["request_rate"] == 4


def test_the_command_lists_what_is_built_in(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert command.run(parser.parse_args(["--list"])) == 0
    out = capsys.readouterr().out
    for name in ("qwen2.5-32b", "rtx-4090", "seed-000"):
        assert name in out


def test_refused_requests_make_the_command_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parse("--request-rate=inf", "--max-num-seqs=2", "--max-num-waiting=3")) == 1
    assert "First error: 429: the queue is full" in capsys.readouterr().out


def test_pictures_are_the_same_for_equal_runs(tmp_path: Path) -> None:
    from millstream.sim.plot import plot_run

    for name in ("a.svg", "b.svg"):
        plot_run(outcome("--num-prompts=3"), str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_gaps_that_nobody_could_see_are_closed() -> None:
    from millstream.sim.plot import merged

    spans = [(0.0, 1.0), (1.01, 2.0), (2.5, 3.0), (3.0, 4.0)]
    assert merged(spans, 0.1) == [(0.0, 2.0), (2.5, 4.0)]
    assert merged(spans, 0.001) == [(0.0, 1.0), (1.01, 2.0), (2.5, 4.0)]


def test_options_are_frozen_and_rates_may_be_infinite() -> None:
    chosen = options("--request-rate=inf")
    assert math.isinf(chosen.load.request_rate)
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.hardware = "x"  # type: ignore[misc]
