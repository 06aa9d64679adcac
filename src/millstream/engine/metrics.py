"""The figures at /metrics, in Prometheus' text form. Names follow the field's, with our prefix."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from millstream.messages import SchedulerStats
from millstream.request import FinishReason

_LATENCY = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)


@dataclass
class RequestTimes:
    """When an answer was asked for and when its tokens came, in seconds of one clock."""

    arrival: float
    first_token: float | None = None
    last_token: float = 0.0


class EngineMetrics:
    """Counters, gauges and histograms of one engine."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        labels, values = ["model_name"], {"model_name": model_name}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"millstream:{name}", text, labels, registry=self._registry).labels(**values)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"millstream:{name}", text, labels, registry=self._registry).labels(**values)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> _Histogram:
            made = _Histogram(f"millstream:{name}", text, buckets, values)
            self._registry.register(made)
            return made

        self._running = gauge("num_requests_running", "Requests being computed")
        self._waiting = gauge("num_requests_waiting", "Requests in the queue")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests started")
        self._generation_tokens = counter("generation_tokens", "Tokens generated")
        self._preemptions = counter("num_preemptions", "Requests that lost their blocks and started again")
        self._step_requests = histogram("step_batch_size", "Requests in a step", _SIZES)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens in a step", _SIZES)
        self._step_seconds = histogram("step_time_seconds", "Duration of a step", _LATENCY)
        self._first_step = histogram("first_step_batch_size", "Requests in the first step after idle time", _SIZES)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to first token", _LONG)
        self._itl = histogram("inter_token_latency_seconds", "Between the tokens of an answer", _LATENCY)
        self._tpot = histogram("time_per_output_token_seconds", "Mean by answer, first token excluded", _LATENCY)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to last token", _LONG)
        self._active = counter("pipeline_active_seconds", "Time with at least one step in flight")
        self._predicted = counter("step_predicted_seconds", "What steps were expected to take on their slowest stage")
        self._measured = counter("step_measured_seconds", "What they took on it")
        self._prediction_ratio = histogram("step_prediction_ratio", "Predicted over measured, by step", _RATIOS)
        self._stages = _StageMetrics(self._registry, values)
        success = Counter(
            "millstream:request_success",
            "Answers ended, by reason",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished = {
            reason: success.labels(model_name=model_name, finished_reason=str(reason)) for reason in FinishReason
        }

    def render(self) -> bytes:
        """All figures as text."""
        return generate_latest(self._registry)

    def step(self, stats: SchedulerStats) -> None:
        """Take what the scheduler tells with a step (or, without requests in it, after an abort)."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_usage)
        self._prefix_queries.inc(stats.num_prefix_queries)
        self._prefix_hits.inc(stats.num_prefix_hits)
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._generation_tokens.inc(stats.num_generation_tokens)
        self._preemptions.inc(stats.num_preemptions)
        if stats.num_step_requests:
            self._step_requests.observe(stats.num_step_requests)
            self._step_tokens.observe(stats.num_step_tokens)
            self._step_seconds.observe(stats.step_seconds)
            self._take_times(stats)
        if stats.num_first_step_requests:
            self._first_step.observe(stats.num_first_step_requests)

    def _take_times(self, stats: SchedulerStats) -> None:
        self._active.inc(stats.step_seconds)
        self._stages.step(stats.stage_seconds, active=stats.step_seconds)
        measured = max(stats.stage_seconds, default=0.0)
        if measured > 0 and stats.predicted_seconds > 0:
            self._predicted.inc(stats.predicted_seconds)
            self._measured.inc(measured)
            self._prediction_ratio.observe(stats.predicted_seconds / measured)

    def tokens(self, times: RequestTimes, count: int, now: float) -> None:
        """`count` tokens of an answer came at `now`."""
        if times.first_token is None:
            times.first_token = now
            self._ttft.observe(now - times.arrival)
            count -= 1
        if count:
            self._itl.observe((now - times.last_token) / count, count)
        times.last_token = now

    def request(self, times: RequestTimes, num_output_tokens: int, now: float) -> None:
        """An answer is complete."""
        self._e2e.observe(now - times.arrival)
        if times.first_token is not None and num_output_tokens > 1:
            self._tpot.observe((now - times.first_token) / (num_output_tokens - 1))

    def finished(self, reason: FinishReason) -> None:
        self._finished[reason].inc()


class _Histogram:
    """As prometheus_client's, for one thread: a fourth of the time, which counts where each token is observed."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], labels: dict[str, str]) -> None:
        self._name = name
        self._text = text
        self._bounds = buckets
        self._labels = labels
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> list[Metric]:
        """What the registry asks for."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, itertools.accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        return [family]


class _StageMetrics:
    """How busy each pipeline stage is. For a span of time the bubble is 1 - increase(busy) / increase(active); the
    gauge is that since the start."""

    def __init__(self, registry: CollectorRegistry, values: dict[str, str]) -> None:
        labels = [*values, "stage"]
        self._values = values
        self._busy = Counter(
            "millstream:stage_busy_seconds", "Time that a pipeline stage computed", labels, registry=registry
        )
        self._children: list[tuple[Counter, Gauge]] = []
        self._bubble = Gauge(
            "millstream:stage_bubble_ratio",
            "Share of the time with a step in flight that a pipeline stage did not compute, since the start, 0 to 1",
            labels,
            registry=registry,
        )
        self._active_seconds = 0.0
        self._busy_seconds: list[float] = []

    def step(self, stage_seconds: list[float], *, active: float) -> None:
        """A step landed: what each stage computed on it, and by how much the time with a step in flight grew."""
        self._active_seconds += active
        for stage in range(len(self._children), len(stage_seconds)):
            own = {**self._values, "stage": str(stage)}
            self._children.append((self._busy.labels(**own), self._bubble.labels(**own)))
            self._busy_seconds.append(0.0)
        for stage, seconds in enumerate(stage_seconds):
            self._busy_seconds[stage] += seconds
            busy, bubble = self._children[stage]
            busy.inc(seconds)
            if self._active_seconds > 0:
                bubble.set(max(0.0, 1 - self._busy_seconds[stage] / self._active_seconds))
