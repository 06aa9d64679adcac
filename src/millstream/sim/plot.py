"""Pictures of a run and of a sweep, as PNG or SVG, by matplotlib (the `bench` extra), which is imported when used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.errors import ConfigError
from millstream.sim.report import mean_of, p99_of
from millstream.sim.run import Outcome
from millstream.sim.timeline import Timeline

MAX_BARS = 2000
"""On each stage and of each kind; no screen shows more."""
_CHUNKS, _DECODES = "#4878a8", "#e0a030"


def _figure(num_rows: int, height: float) -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError("--plot needs matplotlib: pip install 'millstream[bench]'") from e
    # the same settings, the same file
    matplotlib.rcParams["svg.hashsalt"] = "millstream"
    figure = Figure(figsize=(11, height), layout="constrained")
    return figure, figure.subplots(num_rows, 1)


def _save(figure: Any, path: str) -> None:
    # no date in the file: equal runs give equal files
    metadata = {"Date": None} if path.endswith(".svg") else {}
    try:
        figure.savefig(path, metadata=metadata, dpi=120)
    except ValueError as e:
        # of its suffix
        raise ConfigError(f"--plot {path} can't be written: {e}") from e
    except OSError as e:
        raise ConfigError(f"--plot {path} can't be written: {e.strerror or e}") from e


def plot_run(outcome: Outcome, path: str) -> None:
    """Timeline of the stages, requests and KV cache over time, and how TTFT and E2EL are distributed.

    Raises ConfigError where matplotlib is missing or the file can't be written.
    """
    figure, (stages, engine, latency) = _figure(3, 10.0)
    _draw_stages(stages, outcome.timeline, len(outcome.stages))
    samples = outcome.occupancy.samples
    times = [s.at for s in samples]
    engine.plot(times, [s.num_running for s in samples], label="running", color=_CHUNKS)
    engine.plot(times, [s.num_waiting for s in samples], label="waiting", color="#b04040")
    engine.set(xlabel="seconds", ylabel="requests")
    engine.legend(loc="upper left")
    cache = engine.twinx()
    cache.plot(times, [100 * s.kv_usage for s in samples], color="#808080", linestyle="--")
    cache.set(ylabel="KV cache in use, % (dashed)", ylim=(0, 105))
    good = [r for r in outcome.report.records if r.is_ok]
    for name, values in (("TTFT", [r.ttft for r in good]), ("E2EL", [r.e2el for r in good])):
        latency.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values) * 100, label=name)
    latency.set(xlabel="seconds", ylabel="% of the requests", xscale="log")
    latency.legend()
    _save(figure, path)


def plot_stages(timeline: Timeline, num_stages: int, path: str) -> None:
    """The timeline of the stages alone. Raises ConfigError as `plot_run` does."""
    figure, axes = _figure(1, 1.5 + 0.6 * num_stages)
    _draw_stages(axes, timeline, num_stages)
    _save(figure, path)


def _draw_stages(axes: Any, timeline: Timeline, num_stages: int) -> None:
    shortest_gap = timeline.end / MAX_BARS
    for stage in range(num_stages):
        work = [w for w in timeline.work if w.stage == stage]
        for has_chunks, color in ((True, _CHUNKS), (False, _DECODES)):
            times = [(w.start, w.end) for w in work if (w.num_chunk_tokens > 0) is has_chunks]
            bars = [(start, end - start) for start, end in merged(times, shortest_gap)]
            axes.broken_barh(bars, (num_stages - 1 - stage - 0.4, 0.8), facecolors=color)
    axes.set_yticks(range(num_stages), [f"stage {s}" for s in reversed(range(num_stages))])
    axes.set(xlabel="seconds", title="Steps on the stages: with prompt chunks (blue), decodes only (yellow)")


def merged(times: Sequence[tuple[float, float]], shortest_gap: float) -> list[tuple[float, float]]:
    """Spans in order, those joined between which nobody could see the gap."""
    joined: list[tuple[float, float]] = []
    for start, end in times:
        if joined and start - joined[-1][1] < shortest_gap:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def plot_sweep(points: Sequence[tuple[float, Outcome]], path: str, *, best: float | None) -> None:
    """Throughput and latencies over the request rate. Raises ConfigError as `plot_run` does."""
    figure, rows = _figure(3, 10.0)
    rates = [rate for rate, _ in points]
    metrics = [outcome.report.metrics for _, outcome in points]
    rows[0].plot(rates, [m.output_throughput for m in metrics], marker="o", label="output tokens/s")
    for axes, name, scale, summaries in (
        (rows[1], "TTFT", "log", [m.ttft for m in metrics]),
        (rows[2], "TPOT", "linear", [m.tpot for m in metrics]),
    ):
        axes.plot(rates, [mean_of(s) for s in summaries], marker="o", label=f"{name}, mean")
        axes.plot(rates, [p99_of(s) for s in summaries], marker="o", linestyle="--", label=f"{name}, P99")
        axes.set(ylabel="ms", yscale=scale)
    for axes in rows:
        if best is not None:
            axes.axvline(best, color="#40a040", linestyle=":", label="highest good rate")
        axes.set(xlabel="requests/s")
        axes.legend()
    _save(figure, path)
