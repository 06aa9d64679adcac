"""Measures this machine with a real model and writes the hardware profile `this-cpu`.

    steps of chosen shapes on the real workers ─> seconds ─> shares of the best arithmetic and bandwidth that were seen
    the real engine loop on an instant device ─> seconds of the engine process for each step and each row

The peaks are whatever makes the best share 1, so the figures only mean something together. All of a layer's overhead is
in the shares: other batch sizes and other layer counts are predicted well, other widths less so.

With fewer threads than cores, stages fill the cores as they would in a pipeline: cores that work at once share the
memory's bandwidth. A shared machine may change its speed within seconds: so every shape is timed in each of several
passes, and its seconds are the mean over them, interruptions included, as a load of minutes will meet them.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec

from millstream.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.errors import ConfigError
from millstream.executor.base import Executor, OnProgress, make_executor
from millstream.messages import (
    EngineRequest,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    WorkerInfo,
    decode_from_engine,
    encode,
)
from millstream.models.arch import ModelArch
from millstream.models.sizes import stage_bytes
from millstream.parallel.stage import stages_of
from millstream.request import SamplingParams
from millstream.sim.cost import CostModel, shape_of
from millstream.sim.hardware import THIS_CPU, HardwareProfile, calibrated_path
from millstream.sim.shapes import load_shape

DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
CHUNK_TOKENS = (128, 256, 512)
LONG_CONTEXT = 1024
LONG_ROWS = 16
LONG_CHUNK = 256
LONG_CHUNK_CONTEXT = 1792
SHORT_CONTEXT = 8
PASSES = 6
MIN_SECONDS, MIN_REPEATS, MAX_REPEATS = 0.15, 3, 40
FRONT_END_US = 3000.0
_BEST_SHARE = 2.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A step to be timed: so many rows of so many tokens, each after `context` tokens."""

    num_rows: int
    num_tokens: int
    context: int


class Prober:
    """Sends steps of chosen shapes to a real executor."""

    def __init__(self, executor: Executor, info: WorkerInfo) -> None:
        self._executor = executor
        self._info = info
        self._ids = itertools.count()

    def step(self, probe: Probe) -> SchedulerOutput:
        """A step of new requests whose context counts as computed: what it holds does not change the time."""
        size = self._info.block_size
        num_known = probe.context + probe.num_tokens
        blocks_each = -(-num_known // size)
        assert probe.num_rows * blocks_each <= self._info.num_blocks, "the probe does not fit into the KV cache"
        params = SamplingParams(temperature=0)
        token_ids = [100 + i % 1000 for i in range(num_known)]
        number = next(self._ids)
        new = [
            NewRequest(
                request_id=f"probe-{number}-{row}",
                token_ids=token_ids,
                num_prompt_tokens=num_known,
                sampling_params=params,
                stop_token_ids=[],
                block_ids=list(range(row * blocks_each, (row + 1) * blocks_each)),
                num_computed_tokens=probe.context,
            )
            for row in range(probe.num_rows)
        ]
        return SchedulerOutput(
            step_id=number,
            # not before its tokens are back at the first stage
            forget_ids=[f"probe-{number - self._executor.depth - 1}-{row}" for row in range(max(DECODE_ROWS))],
            new_requests=new,
            request_ids=[n.request_id for n in new],
            num_computed_tokens=[probe.context] * probe.num_rows,
            num_scheduled_tokens=[probe.num_tokens] * probe.num_rows,
            new_block_ids=[[]] * probe.num_rows,
            num_sampled_tokens=[1] * probe.num_rows,
        )

    def seconds(self, probe: Probe) -> float:
        """The mean time of the step, over at least MIN_REPEATS runs; the first is not counted.

        Of several stages it is the sum of their times, while all of them are kept busy.
        """
        if self._executor.depth > 1:
            return self._stage_seconds(probe)
        self._executor.submit(self.step(probe))[0].result()
        times: list[float] = []
        while _goes_on(times):
            step = self.step(probe)
            started = time.perf_counter()
            self._executor.submit(step)[0].result()
            times.append(time.perf_counter() - started)
        return statistics.fmean(times)

    def _stage_seconds(self, probe: Probe) -> float:
        in_flight = [self._executor.submit(self.step(probe))[0] for _ in range(self._executor.depth + 1)]
        times: list[float] = []
        while _goes_on(times[self._executor.depth :]):
            result = in_flight.pop(0).result()
            times.append(sum(result.stage_seconds) + sum(result.stage_send_seconds))
            in_flight.append(self._executor.submit(self.step(probe))[0])
        for future in in_flight:
            future.result()
        # while the first came through the others waited for them
        return statistics.fmean(times[self._executor.depth :])


def _goes_on(times: Sequence[float]) -> bool:
    return len(times) < MIN_REPEATS or (sum(times) < MIN_SECONDS and len(times) < MAX_REPEATS)


def fit(
    arch: ModelArch,
    dtype: str,
    make_step: Callable[[Probe], SchedulerOutput],
    seconds_of: Callable[[Probe], float],
    *,
    host: tuple[float, float],
    description: str,
    sources: Sequence[str],
    memory_gib: float,
    quantization: str | None = None,
) -> HardwareProfile:
    """The profile with which the cost model gives the measured seconds.

    `host` are the seconds of the engine process for each step and for each row.
    """

    def cost_of(profile: HardwareProfile) -> CostModel:
        return CostModel(arch, profile, dtype=dtype, parallel=ParallelConfig(), quantization=quantization)

    probes = {n: Probe(n, 1, SHORT_CONTEXT) for n in DECODE_ROWS} | {n: Probe(1, n, 0) for n in CHUNK_TOKENS}
    seconds = _timed([*probes.values(), _LONG_DECODES, _LONG_CHUNK], seconds_of)
    measured = {n: seconds[probe] for n, probe in probes.items()}
    ops = 2.0 * arch.num_parameters()
    # what one row gets of the memory and the longest chunk gets of the arithmetic are the peaks
    (whole,) = stages_of((arch.num_layers,))
    bandwidth = stage_bytes(arch, whole, dtype, quantization=quantization, is_head_shared=True) / measured[1]
    peak = max(n * ops / measured[n] for n in CHUNK_TOKENS)
    profile = HardwareProfile(
        name=THIS_CPU,
        description=description,
        sources=list(sources),
        peak_tflops={kind: peak / 1e12 for kind in (dtype, quantization) if kind is not None},
        memory_gib=memory_gib,
        memory_share=0.9,
        bandwidth_gbs=bandwidth / 1e9,
        link="shared memory",
        link_gbs=max(bandwidth / 8e9, 1.0),
        link_latency_us=50.0,
        linear_compute=[(1.0, 1.0)],
        linear_bandwidth=[(1.0, 1.0)],
        attention_compute=1.0,
        attention_bandwidth=1.0,
        layer_us=0.0,
        step_us=0.0,
        sampled_row_us=0.0,
        host_step_us=host[0] * 1e6,
        host_row_us=host[1] * 1e6,
        return_us=0.0,
        front_end_us=FRONT_END_US,
    )
    profile = _with_attention(cost_of, profile, make_step, seconds)
    cost, shares = cost_of(profile), []
    for rows, taken in sorted(measured.items()):
        step = make_step(probes[rows])
        attention = _attention_seconds(cost, step)
        shares.append((float(rows), (cost(step).stages[0] - attention) / max(taken - attention, taken / 10)))
    return msgspec.structs.replace(profile, linear_compute=shares, linear_bandwidth=shares)


def _attention_seconds(cost: CostModel, step: SchedulerOutput) -> float:
    """What of a step is attention."""
    return cost.arch.num_layers * cost.attention_seconds(shape_of(step))


def _timed(probes: Sequence[Probe], seconds_of: Callable[[Probe], float]) -> dict[Probe, float]:
    passes = [{probe: seconds_of(probe) for probe in probes} for _ in range(PASSES)]
    return {probe: statistics.fmean(times[probe] for times in passes) for probe in probes}


_LONG_DECODES = Probe(LONG_ROWS, 1, LONG_CONTEXT)
_LONG_CHUNK = Probe(1, LONG_CHUNK, LONG_CHUNK_CONTEXT)


def _with_attention(
    cost_of: Callable[[HardwareProfile], CostModel],
    profile: HardwareProfile,
    make_step: Callable[[Probe], SchedulerOutput],
    seconds: dict[Probe, float],
) -> HardwareProfile:
    """The shares of attention, from what a long context adds to a step."""

    def share(long: Probe, short: Probe) -> float:
        cost = cost_of(profile)
        long_seconds, short_seconds = (_attention_seconds(cost, make_step(probe)) for probe in (long, short))
        # nothing is done much faster than what is done best: a difference lost in the noise would make it free
        return min(_BEST_SHARE, (long_seconds - short_seconds) / max(seconds[long] - seconds[short], 1e-6))

    profile = msgspec.structs.replace(
        profile, attention_bandwidth=share(_LONG_DECODES, Probe(LONG_ROWS, 1, SHORT_CONTEXT))
    )
    return msgspec.structs.replace(profile, attention_compute=share(_LONG_CHUNK, Probe(1, LONG_CHUNK, 0)))


class _InstantExecutor:
    """Answers at once, so that all the time there is, is the engine's."""

    depth = 1

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        return self._info

    def submit(self, step: SchedulerOutput) -> list[Future[ModelRunnerOutput]]:
        future: Future[ModelRunnerOutput] = Future()
        rows = [r for r, wanted in zip(step.request_ids, step.num_sampled_tokens, strict=True) if wanted]
        future.set_result(ModelRunnerOutput(step.step_id, rows, [[100]] * len(rows), logprobs={}, prompt_logprobs={}))
        return [future]

    def shutdown(self) -> None:
        """Nothing runs."""


def host_seconds(info: WorkerInfo) -> tuple[float, float]:
    """What the engine loop takes for a step, and for each of its rows: the line through few and many rows."""

    def per_step(num_rows: int, num_steps: int) -> float:
        core = EngineCore(EngineConfig(scheduler=SchedulerConfig(max_num_seqs=num_rows)), _InstantExecutor(info))
        params = SamplingParams(max_tokens=num_steps + 8, temperature=0, ignore_eos=True)
        for i in range(num_rows):
            core.add(EngineRequest(f"{i}", [100] * 8, params))
        core.step()
        started = time.perf_counter()
        for _ in range(num_steps):
            outputs = core.step()
            assert outputs is not None
            # as the engine process does: what is new goes out as bytes, and is read in the API process
            decode_from_engine(encode(outputs))
        return (time.perf_counter() - started) / num_steps

    few, many = 1, 32
    low, high = per_step(few, 1000), per_step(many, 200)
    row = max(0.0, (high - low) / (many - few))
    return max(0.0, low - few * row), row


def calibrate(
    model: str | None, *, cache_dir: str | None, dtype: str, threads: int | None, quantization: str | None = None
) -> Path:
    """Measure and write the profile; where it is. Takes less than a minute. Raises ModelError or ConfigError."""
    arch = load_shape(model or ModelConfig().model, cache_dir=cache_dir)
    num_stages = 1 if threads is None else min(max(1, len(os.sched_getaffinity(0)) // threads), arch.num_layers)
    config = EngineConfig(
        model=ModelConfig(
            model=model or ModelConfig().model,
            dtype=dtype,
            quantization=quantization,
            cache_dir=cache_dir,
            max_model_len=2048,
        ),
        cache=CacheConfig(kv_cache_memory=1.0),
        scheduler=SchedulerConfig(
            max_num_seqs=(num_stages + 3) * max(DECODE_ROWS), max_num_batched_tokens=max(CHUNK_TOKENS)
        ),
        parallel=ParallelConfig(
            threads=None if threads is None else threads * num_stages, pipeline_parallel_size=num_stages
        ),
    )
    executor = make_executor(config)
    try:
        info = executor.start(lambda done, total: None)
        prober = Prober(executor, info)
        profile = fit(
            arch,
            info.dtype,
            prober.step,
            prober.seconds,
            host=host_seconds(info),
            description=f"{_cpu_name()}, measured with {config.model.model} in {quantization or info.dtype}",
            sources=[
                f"Measured by millstream simulate --calibrate, {threads or 'all'} threads"
                + (f" in each of {num_stages} stages" if num_stages > 1 else "")
            ],
            memory_gib=(info.weight_bytes + info.kv_cache_bytes) / 2**30 / 0.9 + 4,
            quantization=quantization,
        )
    finally:
        executor.shutdown()
    path = calibrated_path(threads, quantization)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2))
    except OSError as e:
        raise ConfigError(f"the profile can't be written to {path}: {e.strerror or e}") from e
    return path


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
