"""What a simulation prints below the `Serving Benchmark Result` table."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.bench.metrics import Metrics, Summary
from millstream.sim.loop import Sample
from millstream.sim.run import Outcome, Setup
from millstream.sim.timeline import draw_text

GIB = 2**30
CHART_WIDTH = 60
_BARS = " ▁▂▃▄▅▆▇█"


def deployment(setup: Setup) -> list[str]:
    """What runs on what, before the run."""
    info, cost, hardware = setup.info, setup.cost, setup.cost.hardware
    capacity = info.num_blocks * info.block_size
    sizes = ",".join(str(stage.num_layers) for stage in cost.stages)
    is_joined = cost.num_stages * cost.tensor_parallel_size > 1
    dtype = info.dtype if cost.quantization is None else f"{cost.quantization} weights, {info.dtype}"
    width = f" x {cost.tensor_parallel_size}" if cost.tensor_parallel_size > 1 else ""
    return [
        f"{setup.model_name} ({dtype}) on {cost.num_stages}{width} x {hardware.name}: {hardware.description}",
        f"Stages: {cost.num_stages} of {sizes} layers" + (f", joined by {hardware.link}" if is_joined else ""),
        f"Weights: {info.weight_bytes / GIB:.2f} GiB; KV cache: {info.kv_cache_bytes / GIB:.2f} GiB, {capacity} tokens "
        f"in {info.num_blocks} blocks; longest request {info.max_model_len} tokens",
    ]


def usage(outcome: Outcome) -> list[str]:
    """Busy and bubble shares, KV cache over time, the pipeline's timeline, and what the simulation took."""
    occupancy = outcome.occupancy
    lines = [f"{'Stage':<8}{'busy':>8}{'bubble':>8}   (of the run; of the time with a step in the pipe)"]
    lines += [f"{i:<8}{use.busy:>8.1%}{use.bubble:>8.1%}" for i, use in enumerate(outcome.stages)]
    peak = max((s.num_running for s in occupancy.samples), default=0)
    lines.append(
        f"KV cache: at most {occupancy.max_kv_usage:.1%} in use; about {peak} requests running at once, at most; "
        f"{occupancy.num_preemptions} preemptions"
    )
    if occupancy.num_prefix_hits:
        share = occupancy.num_prefix_hits / occupancy.num_prompt_tokens
        lines.append(f"Prefix cache: {share:.1%} of the prompt tokens were cached")
    end = occupancy.samples[-1].at
    lines.append(f"KV in use over {end:.2f} s:")
    lines.append(f"        |{sparkline(occupancy.samples, end, CHART_WIDTH)}|")
    if outcome.timeline.work and outcome.timeline.end > 0:
        end = outcome.timeline.end
        what = "the run" if not outcome.timeline.num_left_out else "its beginning"
        lines.append(f"Stages busy over {end:.2f} s ({what}):")
        lines += draw_text(outcome.timeline, len(outcome.stages), first=0.0, last=end, width=CHART_WIDTH)
    lines.append(f"Simulated {occupancy.num_steps} steps in {outcome.wall_seconds:.2f} s.")
    return lines


def sparkline(samples: Sequence[Sample], duration: float, width: int) -> str:
    """KV usage over time, a bar for each of `width` equal spans: the largest sample in it, or the last one before."""
    if duration <= 0:
        return " " * width
    top = [-1.0] * width
    for sample in samples:
        i = min(int(sample.at / duration * width), width - 1)
        top[i] = max(top[i], sample.kv_usage)
    bars, level = [], 0.0
    for value in top:
        level = value if value >= 0 else level
        bars.append(_BARS[min(round(level * (len(_BARS) - 1)), len(_BARS) - 1)])
    return "".join(bars)


SWEEP_COLUMNS = " ".join(
    f"{name:>{width}}"
    for name, width in (
        ("req/s", 8),
        ("served/s", 9),
        ("out tok/s", 10),
        ("TTFT", 9),
        ("P99", 9),
        ("TPOT", 8),
        ("P99", 8),
        ("E2EL", 10),
        ("P99", 10),
    )
)


def sweep_row(rate: float, outcome: Outcome) -> str:
    """A line of the sweep's table: means and 99th percentiles in ms."""
    m: Metrics = outcome.report.metrics
    cells = [f"{rate:>8g}", f"{m.request_throughput:>9.3f}", f"{m.output_throughput:>10.1f}"]
    for summary, width in ((m.ttft, 9), (m.tpot, 8), (m.e2el, 10)):
        cells += [f"{mean_of(summary):>{width}.1f}", f"{p99_of(summary):>{width}.1f}"]
    if outcome.share_kept is not None:
        cells.append(f"{outcome.share_kept:>7.1%}")
    return " ".join(cells)


def mean_of(summary: Summary | None) -> float:
    return summary.mean if summary is not None else float("nan")


def p99_of(summary: Summary | None) -> float:
    """The 99th percentile, or the highest that was asked for."""
    if summary is None:
        return float("nan")
    values = dict(summary.percentiles)
    return values.get(99.0, values[max(values)]) if values else float("nan")
