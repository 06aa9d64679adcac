"""One load at several request rates: the curve of latency over throughput, and the highest rate that is good enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from millstream.bench.options import BenchOptions
from millstream.sim.run import Outcome, Setup, simulate


def sweep(setup: Setup, options: BenchOptions, rates: Sequence[float]) -> Iterator[tuple[float, Outcome]]:
    """An outcome for each rate, as it is found. Raises ConfigError as `simulate` does."""
    for rate in rates:
        yield rate, simulate(setup, dataclasses.replace(options, request_rate=rate), keep_work=0)


def highest_good_rate(points: Sequence[tuple[float, Outcome]], *, share: float) -> float | None:
    """The highest rate up to which every run kept the limits for `share` of its requests; None: not even the first.

    A rate beyond one that failed does not count, even where chance let it pass.
    """
    best = None
    for rate, outcome in points:
        if outcome.share_kept is None or outcome.share_kept < share:
            return best
        best = rate
    return best
