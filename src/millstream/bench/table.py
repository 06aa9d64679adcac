"""The `Serving Benchmark Result` table: 50 columns, rows and order as the field knows them."""

from __future__ import annotations

from collections.abc import Collection

from millstream.bench.metrics import Metrics, Summary

WIDTH = 50
SECTIONS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GAP_TITLE = "Per-token Gap (chunk gap / its tokens)"


def percentile_name(p: float) -> str:
    """`P99`, `P99.9`."""
    return f"P{p:g}"


def _row(label: str, value: float | int | None) -> str:
    text = "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}"


def _section(title: str, name: str, summary: Summary | None, percentiles: Collection[float]) -> list[str]:
    lines = [f"{title:-^{WIDTH}}"]
    values = dict(summary.percentiles) if summary else {}
    lines.append(_row(f"Mean {name} (ms):", summary.mean if summary else None))
    lines.append(_row(f"Median {name} (ms):", summary.median if summary else None))
    lines.extend(_row(f"{percentile_name(p)} {name} (ms):", values.get(p)) for p in percentiles)
    return lines


def render(metrics: Metrics, *, sections: Collection[str], percentiles: Collection[float]) -> str:
    """The table as text. `sections` are keys of SECTIONS; per-token gap is added last when `itl` is among them."""
    lines = [
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        _row("Successful requests:", metrics.completed),
        _row("Benchmark duration (s):", metrics.duration),
        _row("Total input tokens:", metrics.total_input_tokens),
        _row("Total generated tokens:", metrics.total_output_tokens),
        _row("Request throughput (req/s):", metrics.request_throughput),
    ]
    if metrics.request_goodput is not None:
        lines.append(_row("Request goodput (req/s):", metrics.request_goodput))
    lines.append(_row("Output token throughput (tok/s):", metrics.output_throughput))
    lines.append(_row("Total Token throughput (tok/s):", metrics.total_token_throughput))
    for key, title in SECTIONS.items():
        if key in sections:
            lines += _section(title, key.upper(), getattr(metrics, key), percentiles)
    if "itl" in sections:
        lines += _section(GAP_TITLE, "PTG", metrics.ptg, percentiles)
    lines.append("=" * WIDTH)
    return "\n".join(lines)
