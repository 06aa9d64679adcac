"""`millstream simulate`: what a model would do on some hardware with some load."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from millstream.errors import ConfigError
from millstream.sim.options import SimOptions, add_arguments, from_args

if TYPE_CHECKING:
    from millstream.sim.run import Outcome

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace, env: Mapping[str, str] | None = None) -> int:
    """Run the simulation of parsed flags and print its table on stdout.

    `env` may hold `MILLSTREAM_...` settings. Returns 0, or 1 if a request failed. Raises ConfigError for flags that
    contradict each other and ModelError for a model that can't be read.
    """
    if args.list:
        return _list()
    if args.calibrate:
        return _calibrate(args)
    options = from_args(args, env or {})
    return _sweep(options) if options.sweep is not None else _simulate(options)


# Imported where used, because every `millstream` command builds the parser above.


def _list() -> int:
    from millstream.sim.hardware import THIS_CPU, built_in_names, calibrated_path, load_hardware
    from millstream.sim.load import read_recorded, recorded_names
    from millstream.sim.shapes import card_names, load_card

    print("Shapes (--model-card):")
    for name in card_names():
        arch = load_card(name)
        size = arch.weight_bytes("bfloat16") / 2**30
        print(f"  {name:<16} {arch.num_parameters() / 1e9:6.2f} B parameters, {size:6.1f} GiB in bfloat16")
    print("Hardware (--hardware):")
    for name in built_in_names():
        print(f"  {name:<16} {load_hardware(name).description}")
    measured = sorted(calibrated_path().parent.glob(f"{THIS_CPU}*.json"))
    for path in measured:
        print(f"  {path.stem:<16} {load_hardware(str(path)).description}")
    if not measured:
        print(f"  {THIS_CPU:<16} not measured yet: --calibrate")
    print("Recorded loads (--replay):")
    for name in recorded_names():
        requests = read_recorded(name)
        inputs, outputs = sum(r.input_len for r in requests), sum(r.output_len for r in requests)
        print(f"  {name:<16} {len(requests)} requests in {requests[-1].at:.1f} s, {inputs} tokens in, {outputs} out")
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from millstream.sim.calibrate import calibrate

    if args.model_card is not None:
        raise ConfigError("--calibrate measures a real model: give --model (default: smollm2), not --model-card")
    path = calibrate(
        args.model,
        cache_dir=args.cache_dir,
        dtype=args.dtype,
        threads=args.threads,
        quantization=args.quantization,
    )
    print(f"Profile written to {path}: use it with --hardware {path.stem}")
    return 0


def _simulate(options: SimOptions) -> int:
    from millstream.bench import result
    from millstream.bench.table import render
    from millstream.sim import report
    from millstream.sim.run import make_setup, simulate
    from millstream.sim.timeline import chrome_trace, save_trace

    load, setup = options.load, make_setup(options)
    if load.save_result:
        result.make_dir(load)
    for line in report.deployment(setup):
        print(line)
    with _progress(load.num_prompts, load.progress) as advance:
        outcome = simulate(setup, load, replay=options.replay, keep_names=options.trace is not None, on_finish=advance)
    metrics = outcome.report.metrics
    print(render(metrics, sections=load.percentile_metrics, percentiles=load.metric_percentiles))
    for line in (*outcome.report.notes, *report.usage(outcome)):
        print(line)
    errors = [r.error for r in outcome.report.records if r.error is not None]
    if errors:
        print(f"Failed requests: {len(errors)}")
        print(f"First error: {errors[0]}")
    if options.trace is not None:
        save_trace(chrome_trace(outcome.timeline, len(outcome.stages)), options.trace)
        print(f"Trace written to {options.trace}", file=sys.stderr)
        if outcome.timeline.num_left_out:
            print(f"It ends early: {outcome.timeline.num_left_out} later pieces are left out", file=sys.stderr)
    if options.plot is not None:
        from millstream.sim.plot import plot_run

        plot_run(outcome, options.plot)
        print(f"Picture written to {options.plot}", file=sys.stderr)
    if load.save_result:
        print(f"Result written to {result.save(outcome.report, load)}", file=sys.stderr)
    return 1 if errors else 0


def _sweep(options: SimOptions) -> int:
    from millstream.bench import result
    from millstream.sim import report
    from millstream.sim.run import make_setup
    from millstream.sim.sweep import highest_good_rate, sweep

    assert options.sweep is not None
    setup = make_setup(options)
    if options.load.save_result:
        result.make_dir(options.load)
    for line in report.deployment(setup):
        print(line)
    limits = options.load.goodput
    print(report.SWEEP_COLUMNS + (f" {'kept':>7}" if limits else ""))
    points: list[tuple[float, Outcome]] = []
    for rate, outcome in sweep(setup, options.load, options.sweep.rates):
        points.append((rate, outcome))
        print(report.sweep_row(rate, outcome), flush=True)
    best = highest_good_rate(points, share=options.slo_share) if limits else None
    if limits:
        wanted = ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits.items())
        found = "none of these rates" if best is None else f"{best:g} requests/s"
        print(f"Highest rate at which {options.slo_share:.0%} of the requests keep {wanted}: {found}")
    if options.load.save_result:
        for rate, outcome in points:
            load = dataclasses.replace(options.load, request_rate=rate, result_filename=_sweep_filename(options, rate))
            print(f"Result written to {result.save(outcome.report, load)}", file=sys.stderr)
    if options.plot is not None:
        from millstream.sim.plot import plot_sweep

        plot_sweep(points, options.plot, best=best)
        print(f"Picture written to {options.plot}", file=sys.stderr)
    return 1 if any(outcome.report.metrics.failed for _, outcome in points) else 0


def _sweep_filename(options: SimOptions, rate: float) -> str | None:
    """A file for each rate: the rate before the suffix of the name that was given; None: the usual name."""
    name = options.load.result_filename
    return None if name is None else f"{name.removesuffix('.json')}-{rate:g}qps.json"


@contextmanager
def _progress(num_requests: int, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, where that is a terminal; gives what advances it by one request."""
    if not (is_wanted and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), refresh_per_second=4, transient=True) as progress:
        task = progress.add_task("Requests", total=num_requests)
        yield lambda: progress.advance(task)
