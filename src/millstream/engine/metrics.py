"""The figures at /metrics, in Prometheus' text form. Names follow the field's, with our prefix."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from millstream.messages import SchedulerStats
from millstream.request import FinishReason

_LATENCY = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


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

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"millstream:{name}", text, labels, registry=self._registry, buckets=buckets).labels(
                **values
            )

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
        if stats.num_first_step_requests:
            self._first_step.observe(stats.num_first_step_requests)

    def tokens(self, times: RequestTimes, count: int, now: float) -> None:
        """`count` tokens of an answer came at `now`."""
        if times.first_token is None:
            times.first_token = now
            self._ttft.observe(now - times.arrival)
            count -= 1
        for _ in range(count):
            self._itl.observe((now - times.last_token) / count)
        times.last_token = now

    def request(self, times: RequestTimes, num_output_tokens: int, now: float) -> None:
        """An answer is complete."""
        self._e2e.observe(now - times.arrival)
        if times.first_token is not None and num_output_tokens > 1:
            self._tpot.observe((now - times.first_token) / (num_output_tokens - 1))

    def finished(self, reason: FinishReason) -> None:
        self._finished[reason].inc()
