"""What is measured: the record of one request, and the figures made from all of them.

Times are seconds of `time.perf_counter` in records, and milliseconds in `Summary`. The definitions are those
of `options.DEFINITIONS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it. A time of 0.0 means: did not happen."""

    arrival: float = 0.0
    """When it should have been sent; `start` is later where --max-concurrency held it back."""
    start: float = 0.0
    end: float = 0.0
    """The last chunk with output; without output, the end of the answer."""
    prompt_len: int = 0
    output_len: int = 0
    has_usage: bool = False
    """Whether the lengths are the server's own."""
    chunk_times: list[float] = field(default_factory=list)
    """When each chunk with output came."""
    chunk_texts: list[str] = field(default_factory=list)
    chunk_totals: list[int] = field(default_factory=list)
    """Output tokens so far, of chunks that carry usage (few servers send it)."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Tokens in each chunk: known or estimated by `assign_chunk_tokens`."""
    finish_reason: str | None = None
    error: str | None = None
    """Why it failed; None: it succeeded."""

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def text(self) -> str:
        return "".join(self.chunk_texts)

    @property
    def e2el(self) -> float:
        return self.end - self.start

    @property
    def ttft(self) -> float:
        return (self.chunk_times[0] if self.chunk_times else self.end) - self.start

    @property
    def tpot(self) -> float | None:
        """None for answers of fewer than two tokens."""
        return (self.e2el - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None

    @property
    def itls(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.chunk_times)]


def spread(total: int, weights: Sequence[int]) -> list[int]:
    """`total` tokens over chunks in proportion to `weights`: whole numbers, at least one each.

    The sum is `total`, or the number of chunks where that is more. What rounding leaves goes to the largest
    remainders, the earlier chunk first.
    """
    rest = total - len(weights)
    sum_of_weights = sum(weights)
    if rest <= 0 or sum_of_weights == 0:
        counts = [1] * len(weights)
        for i in range(max(rest, 0)):
            counts[i % len(counts)] += 1
        return counts
    # A chunk's fair share is total * weight / sum; what is above the one token it surely has, it gets from the rest.
    wanted = [max(total * w / sum_of_weights - 1.0, 0.0) for w in weights]
    scale = rest / sum(wanted)
    extra = [int(w * scale) for w in wanted]
    by_remainder = sorted(range(len(weights)), key=lambda i: extra[i] - wanted[i] * scale)
    for i in by_remainder[: rest - sum(extra)]:
        extra[i] += 1
    return [1 + n for n in extra]


def has_exact_chunks(record: RequestRecord) -> bool:
    """Whether the tokens in each chunk are known without an estimate."""
    num_chunks = len(record.chunk_times)
    # The token that ends an answer is in the server's count but has no text, so no chunk.
    unseen = 1 if record.finish_reason == "stop" else 0
    return (
        len(record.chunk_totals) == num_chunks
        or num_chunks <= 1
        or num_chunks <= record.output_len <= num_chunks + unseen
    )


def assign_chunk_tokens(record: RequestRecord, weights: Sequence[int] | None = None) -> None:
    """Set `chunk_tokens`: exact where it can be, else spread by `weights` (default: the chunks' characters)."""
    num_chunks = len(record.chunk_times)
    if num_chunks > 0 and len(record.chunk_totals) == num_chunks:
        totals = [0, *record.chunk_totals]
        record.chunk_tokens = [max(b - a, 1) for a, b in itertools.pairwise(totals)]
    elif num_chunks == 1:
        record.chunk_tokens = [max(record.output_len, 1)]
    elif has_exact_chunks(record):
        record.chunk_tokens = [1] * num_chunks
    else:
        record.chunk_tokens = spread(record.output_len, weights or [len(t) for t in record.chunk_texts])


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A metric over its samples, in milliseconds."""

    mean: float
    median: float
    std: float
    """Of the population."""
    max: float
    percentiles: tuple[tuple[float, float], ...]
    """(percentile, value), linear interpolation."""


def summarize(samples: Sequence[float] | np.ndarray, percentiles: Sequence[float]) -> Summary | None:
    """The summary of samples in seconds; None if there are none."""
    if len(samples) == 0:
        return None
    ms = np.asarray(samples, dtype=np.float64) * 1000.0
    return Summary(
        mean=float(ms.mean()),
        median=float(np.median(ms)),
        std=float(ms.std()),
        max=float(ms.max()),
        percentiles=tuple((p, float(np.percentile(ms, p))) for p in percentiles),
    )


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The figures of a run. Throughputs are per second; a summary is None where nothing could be measured."""

    completed: int
    failed: int
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None
    e2el: Summary | None
    ptg: Summary | None
    client_wait: Summary | None
    tokens_per_chunk: float | None


def is_good(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Whether a request kept every limit (ms). An answer of one token has no TPOT, so keeps any."""
    values = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2el}
    return all(values[name] * 1000.0 <= limit for name, limit in limits.items())


def compute(
    records: Sequence[RequestRecord],
    *,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
    streamed: bool = True,
) -> Metrics:
    """The figures of `records`, whose `chunk_tokens` must be set. `goodput` has upper limits in ms by metric.

    Without `streamed` only E2EL is measured: a whole answer has no first token.
    """
    good = [r for r in records if r.is_ok]
    begun = [r for r in records if r.start > 0]
    duration = max((r.end for r in begun), default=0.0) - min((r.start for r in begun), default=0.0)
    num_input = sum(r.prompt_len for r in good)
    num_output = sum(r.output_len for r in good)
    num_chunks = sum(len(r.chunk_times) for r in good)
    num_in_chunks = sum(sum(r.chunk_tokens) for r in good)
    timed = good if streamed else []
    itls = np.array([gap for r in timed for gap in r.itls])
    tokens = np.array([n for r in timed for n in r.chunk_tokens[1:]], dtype=np.int64)

    def rate(n: float) -> float:
        return n / duration if duration > 0 else 0.0

    return Metrics(
        completed=len(good),
        failed=len(records) - len(good),
        duration=duration,
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=rate(len(good)),
        request_goodput=rate(sum(is_good(r, goodput) for r in good)) if goodput else None,
        output_throughput=rate(num_output),
        total_token_throughput=rate(num_input + num_output),
        ttft=summarize([r.ttft for r in timed], percentiles),
        tpot=summarize([r.tpot for r in timed if r.tpot is not None], percentiles),
        itl=summarize(itls, percentiles),
        e2el=summarize([r.e2el for r in good], percentiles),
        ptg=summarize(np.repeat(itls / tokens, tokens) if len(itls) else [], percentiles),
        client_wait=summarize([r.start - r.arrival for r in good], percentiles),
        tokens_per_chunk=num_in_chunks / num_chunks if streamed and num_chunks else None,
    )
