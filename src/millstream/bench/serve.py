"""`millstream bench serve`: measure a running server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable

from millstream.bench.options import BenchOptions, add_arguments, from_args

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Run the benchmark of parsed flags and print the table on stdout.

    Returns 0, or 1 if a request failed or the server can't be used, or 130 after Ctrl-C. Raises ConfigError for
    flags that contradict each other and files that can't be read.
    """
    options = from_args(args)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("interrupted: no result", file=sys.stderr)
        return 130


def _run(options: BenchOptions) -> int:
    # Imported here because every `millstream` command builds the parser above, and aiohttp and numpy take their time.
    from millstream.bench import result
    from millstream.bench.client import BenchmarkError
    from millstream.bench.runner import benchmark
    from millstream.bench.table import render

    if options.save_result:
        result.make_dir(options)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            report = runner.run(benchmark(options))
    except BenchmarkError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(render(report.metrics, sections=options.percentile_metrics, percentiles=options.metric_percentiles))
    for note in report.notes:
        print(note)
    errors = [r.error for r in report.records if r.error is not None]
    if errors:
        print(f"Failed requests: {len(errors)}")
        print(f"First error: {errors[0]}")
    if options.save_result:
        print(f"Result written to {result.save(report, options)}", file=sys.stderr)
    return 1 if errors else 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which makes the client cheaper, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
