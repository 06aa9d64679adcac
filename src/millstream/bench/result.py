"""The JSON file of a run: flat names as the field uses them, so that existing plots read it."""

from __future__ import annotations

import math
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from millstream.bench.metrics import RequestRecord, Summary
from millstream.bench.options import BenchOptions
from millstream.bench.runner import Report
from millstream.bench.table import percentile_name
from millstream.errors import ConfigError

SUMMARIES = ("ttft", "tpot", "itl", "e2el", "ptg", "client_wait")


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _summary(name: str, summary: Summary) -> dict[str, float]:
    row = {f"mean_{name}_ms": summary.mean, f"median_{name}_ms": summary.median, f"std_{name}_ms": summary.std}
    row[f"max_{name}_ms"] = summary.max
    row.update({f"{percentile_name(p).lower()}_{name}_ms": value for p, value in summary.percentiles})
    return row


def _detail(record: RequestRecord, begin: float) -> dict[str, Any]:
    """One request; times in seconds, `start` after the first request's."""
    return {
        "start": record.start - begin,
        "client_wait": record.start - record.arrival,
        "ttft": record.ttft if record.is_ok else None,
        "tpot": record.tpot if record.is_ok else None,
        "e2el": record.e2el if record.is_ok else None,
        "itls": record.itls,
        "chunk_tokens": record.chunk_tokens,
        "input_len": record.prompt_len,
        "output_len": record.output_len,
        "finish_reason": record.finish_reason,
        "text": record.text,
        "error": record.error,
    }


def to_dict(report: Report, options: BenchOptions, *, date: datetime) -> dict[str, Any]:
    """The run as JSON values; the API key is not in it."""
    m = report.metrics
    result: dict[str, Any] = {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "model_id": report.model,
        "dataset_name": options.dataset_name,
        "num_prompts": options.num_prompts,
        "num_warmups": options.num_warmups,
        "request_rate": _finite(options.request_rate),
        "burstiness": _finite(options.burstiness),
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
        "stream": options.stream,
        "ignore_eos": options.ignore_eos,
        "temperature": options.temperature,
        "extra_body": options.extra_body,
        "duration": m.duration,
        "completed": m.completed,
        "failed": m.failed,
        "total_input_tokens": m.total_input_tokens,
        "total_output_tokens": m.total_output_tokens,
        "request_throughput": m.request_throughput,
        "request_goodput": m.request_goodput,
        "output_throughput": m.output_throughput,
        "total_token_throughput": m.total_token_throughput,
        "tokens_per_chunk": m.tokens_per_chunk,
    }
    for name in SUMMARIES:
        summary: Summary | None = getattr(m, name)
        if summary is not None:
            result.update(_summary(name, summary))
    result["errors"] = sorted({r.error for r in report.records if r.error is not None})
    result["notes"] = report.notes
    if options.save_detailed:
        begin = min(r.start for r in report.records)
        result["requests"] = [_detail(r, begin) for r in report.records]
    return result


def make_dir(options: BenchOptions) -> None:
    """Make the folder for the file, before the run is spent. Raises ConfigError if that can't be done."""
    try:
        Path(options.result_dir).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--result-dir {options.result_dir} can't be made: {e}") from e


def save(report: Report, options: BenchOptions) -> Path:
    """Write the JSON file and return its path. Raises ConfigError if it can't be written."""
    date = datetime.now()
    name = options.result_filename
    if name is None:
        model = re.sub(r"[^A-Za-z0-9._-]+", "-", report.model.rsplit("/", 1)[-1])
        name = f"{options.backend}-{options.request_rate:g}qps-{model}-{date:%Y%m%d-%H%M%S}.json"
    path = Path(options.result_dir) / name
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(to_dict(report, options, date=date)), indent=2))
    except OSError as e:
        raise ConfigError(f"the result can't be written to {path}: {e}") from e
    return path
