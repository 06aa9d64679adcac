"""One simulation from its settings to its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from millstream.bench.metrics import RequestRecord, compute
from millstream.bench.options import BenchOptions
from millstream.bench.runner import Report
from millstream.config import EngineConfig
from millstream.engine.core import EngineCore
from millstream.errors import ConfigError
from millstream.messages import WorkerInfo
from millstream.sim.cost import CostModel
from millstream.sim.executor import SimulatedExecutor, VirtualClock
from millstream.sim.hardware import load_hardware
from millstream.sim.load import Load
from millstream.sim.loop import BEGIN, ClientModel, Occupancy, Simulation
from millstream.sim.options import SimOptions
from millstream.sim.shapes import load_card, load_shape
from millstream.sim.timeline import StageUse, Timeline, stage_use

MADE_UP_IDS = range(16)
MAX_WORK = 200_000


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A deployment: everything but the load."""

    cost: CostModel
    info: WorkerInfo
    engine: EngineConfig
    client: ClientModel
    model_name: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run showed. `report` is what `bench serve` has too."""

    report: Report
    stages: list[StageUse]
    occupancy: Occupancy
    timeline: Timeline
    wall_seconds: float
    """What the simulation itself took."""

    @property
    def share_kept(self) -> float | None:
        """Share of the requests sent that kept every limit of --goodput; None without such limits."""
        metrics = self.report.metrics
        if metrics.request_goodput is None:
            return None
        num_sent = metrics.completed + metrics.failed
        return metrics.request_goodput * metrics.duration / num_sent if num_sent else 0.0


def make_setup(options: SimOptions) -> Setup:
    """Read shape and hardware, plan the memory. Raises ConfigError or ModelError."""
    hardware = load_hardware(options.hardware, options.overrides)
    if options.model_card is not None:
        arch = load_card(options.model_card)
    else:
        assert options.model is not None, "SimOptions refuses to have neither"
        arch = load_shape(options.model, cache_dir=options.engine.model.cache_dir)
    cost = CostModel(
        arch,
        hardware,
        dtype=arch.compute_dtype(options.engine.model.dtype),
        parallel=options.engine.parallel,
        tensor_parallel_size=options.tensor_parallel_size,
        quantization=options.engine.model.quantization,
    )
    return Setup(
        cost=cost,
        info=cost.plan(options.engine.cache, max_model_len=options.engine.model.max_model_len),
        engine=options.engine,
        client=ClientModel(
            max_concurrency=options.load.max_concurrency,
            front_end=hardware.front_end_us * 1e-6,
            stream_interval=options.stream_interval,
        ),
        model_name=options.model_name,
    )


def simulate(
    setup: Setup,
    options: BenchOptions,
    *,
    replay: str | None = None,
    keep_work: int = MAX_WORK,
    keep_names: bool = False,
    on_finish: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run a load. Deterministic: equal settings give equal outcomes, up to `wall_seconds`.

    `replay` names a recorded load; `keep_work` is the number of pieces of the timeline to keep, with the names of their
    requests if `keep_names`; `on_finish` is called as each request ends. Raises ConfigError for a load of which no
    request can run.
    """
    started = time.perf_counter()
    load = Load(options, vocab_size=setup.info.vocab_size, replay=replay)
    clock = VirtualClock(BEGIN)
    timeline = Timeline(begin=BEGIN, limit=keep_work, has_names=keep_names)
    executor = SimulatedExecutor(
        setup.info,
        setup.cost,
        token_ids=MADE_UP_IDS,
        depth=setup.cost.num_stages,
        clock=clock,
        on_span=timeline.add if keep_work else None,
    )
    core = EngineCore(setup.engine, executor, clock=clock)
    simulation = Simulation(
        core, clock, load.arrivals(), client=setup.client, scheduler=setup.engine.scheduler, on_finish=on_finish
    )
    records = simulation.run()
    core.check_integrity()
    core.shutdown()
    report = _report(records, setup, options)
    if report.metrics.completed == 0:
        raise ConfigError(f"no request could run; the first: {records[0].error}")
    return Outcome(
        report=report,
        stages=stage_use(executor.pipe, report.metrics.duration),
        occupancy=simulation.occupancy,
        timeline=timeline,
        wall_seconds=time.perf_counter() - started,
    )


def _report(records: list[RequestRecord], setup: Setup, options: BenchOptions) -> Report:
    metrics = compute(records, percentiles=options.metric_percentiles, goodput=options.goodput, streamed=options.stream)
    hardware = setup.cost.hardware
    notes = [f"Simulated: {setup.model_name} on {hardware.name} ({hardware.description}); no device was used."]
    if options.max_concurrency and metrics.client_wait is not None and metrics.client_wait.mean > 1:
        notes.append(
            f"Requests waited {metrics.client_wait.mean:.2f} ms in the client on average (--max-concurrency); "
            "no time above includes that."
        )
    return Report(model=setup.model_name, metrics=metrics, records=records, notes=notes)
