"""One run: prompts made, requests sent on time, figures computed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millstream.bench.arrivals import arrival_times
from millstream.bench.client import BenchmarkError, CompletionClient, first_model, open_session, raise_file_limit
from millstream.bench.datasets import BenchPrompt, RandomShape, chat_prompts, random_prompts, sharegpt_prompts
from millstream.bench.metrics import Metrics, RequestRecord, assign_chunk_tokens, compute, has_exact_chunks
from millstream.bench.options import BenchOptions
from millstream.bench.tokens import LocalTokenizer, TokenCounter, count_tokens, server_tokenizer

SPARE_FILES = 256
"""Open files beside the connections."""
BUSY_CLIENT = 0.9
"""Share of a core above which the client itself may be what limits the run."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a run. `notes` are sentences about how far the figures can be trusted."""

    model: str
    metrics: Metrics
    records: list[RequestRecord]
    notes: list[str]


def request_body(prompt: BenchPrompt, options: BenchOptions, *, model: str) -> bytes:
    """The JSON of one request, with --extra-body put over it (null takes a field out)."""
    body: dict[str, Any] = {"model": model}
    if options.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": prompt.prompt}]
    else:
        body["prompt"] = prompt.prompt
    body["max_tokens"] = prompt.output_len
    body["temperature"] = options.temperature
    if options.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    if options.ignore_eos:
        body["ignore_eos"] = True
    body.update(options.extra_body)
    return msgspec.json.encode({k: v for k, v in body.items() if v is not None})


async def _prompts(options: BenchOptions, counter: TokenCounter | None) -> list[BenchPrompt]:
    """The prompts of the run, then those of the warm-ups: others (where a file has enough), so that no prefix
    cache knows the former."""
    n = options.num_prompts + options.num_warmups
    if options.dataset_name == "random":
        shape = RandomShape(
            input_len=options.random_input_len,
            output_len=options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
        )
        can_send_ids = options.backend == "openai"
        return await random_prompts(shape, n=n, seed=options.seed, counter=counter, can_send_ids=can_send_ids)
    path = options.dataset_path
    assert path is not None, "BenchOptions refuses a dataset of a file without its path"
    if options.dataset_name == "sharegpt":
        output_len = options.sharegpt_output_len
        return await sharegpt_prompts(path, n=n, seed=options.seed, output_len=output_len, counter=counter)
    return await chat_prompts(path, n=n, output_len=options.output_len, counter=counter)


async def send_all(
    client: CompletionClient,
    bodies: Sequence[bytes],
    records: Sequence[RequestRecord],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None,
    on_finish: Callable[[], None],
) -> None:
    """Send each body at its time (seconds after now), at most `max_concurrency` open at once, and wait for all."""
    gate: contextlib.AbstractAsyncContextManager[Any]
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    begin = time.perf_counter()

    async def send(body: bytes, record: RequestRecord) -> None:
        async with gate:
            await client.send(body, record)
        on_finish()

    async with asyncio.TaskGroup() as tasks:
        for body, record, arrival in zip(bodies, records, arrivals, strict=True):
            record.arrival = begin + arrival
            delay = record.arrival - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.create_task(send(body, record))


async def _warm_up(client: CompletionClient, bodies: Sequence[bytes], options: BenchOptions) -> None:
    records = [RequestRecord() for _ in bodies]
    await send_all(
        client,
        bodies,
        records,
        [0.0] * len(bodies),
        max_concurrency=options.max_concurrency,
        on_finish=lambda: None,
    )
    for record in records:
        if record.error is not None:
            raise BenchmarkError(f"a warm-up request failed: {record.error}")


def _progress(options: BenchOptions) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=4,
        disable=not options.progress,
    )


async def _settle(records: Sequence[RequestRecord], counter: TokenCounter | None, options: BenchOptions) -> list[str]:
    """Count what the server did not count, and give each chunk its tokens; returns notes on estimates."""
    notes = []
    good = [r for r in records if r.is_ok]
    uncounted = [r for r in good if not r.has_usage]
    if uncounted:
        how = "one token for each chunk"
        if counter is not None:
            how = "by the tokenizer"
            texts = [r for r in uncounted if r.text]
            for record, num in zip(texts, await count_tokens(counter, [r.text for r in texts]), strict=True):
                record.output_len = num
        notes.append(f"{len(uncounted)} answers came without usage: their tokens are counted {how}.")
    estimated = 0
    for record in good:
        if has_exact_chunks(record):
            assign_chunk_tokens(record)
            continue
        estimated += 1
        weights = counter.count_pieces(record.chunk_texts) if isinstance(counter, LocalTokenizer) else None
        assign_chunk_tokens(record, weights)
    if estimated and options.stream and "itl" in options.percentile_metrics:
        by = "by the tokenizer" if isinstance(counter, LocalTokenizer) else "by characters"
        notes.append(f"Per-token gap: the tokens of {estimated} answers are spread over their chunks {by}.")
    return notes


def _doubts(records: Sequence[RequestRecord], prompts: Sequence[BenchPrompt], options: BenchOptions) -> list[str]:
    """Notes on answers shorter than asked for."""
    short = sum(r.is_ok and r.output_len < p.output_len for r, p in zip(records, prompts, strict=True))
    if short and options.dataset_name != "chat" and not options.ignore_eos:
        return [f"{short} answers ended before the length asked for: --ignore-eos makes lengths exact."]
    return []


async def benchmark(options: BenchOptions) -> Report:
    """Run it.

    Raises BenchmarkError if the server can't be reached or lacks what is needed, ConfigError for bad files.
    """
    notes = []
    wanted = min(options.max_concurrency or options.num_prompts, options.num_prompts) + SPARE_FILES
    limit = raise_file_limit(wanted)
    if limit is not None and limit < wanted:
        notes.append(f"This process may open {limit} files: that many connections at once, at most (ulimit -n).")
    local = LocalTokenizer(options.tokenizer) if options.tokenizer is not None else None
    async with open_session(options.api_key) as session:
        model = await first_model(session, options.base_url, model=options.model)
        counter = local or await server_tokenizer(session, options.base_url, model=model)
        if counter is None and options.dataset_name != "random":
            notes.append(
                "No tokenizer (neither --tokenizer nor POST /tokenize): prompt lengths are estimated by words."
            )
        prompts = await _prompts(options, counter)
        bodies = [request_body(p, options, model=model) for p in prompts]
        n = options.num_prompts
        client = CompletionClient(session, options.url, stream=options.stream)
        await _warm_up(client, bodies[n:], options)
        records = [RequestRecord(prompt_len=p.prompt_len) for p in prompts[:n]]
        arrivals = arrival_times(n, rate=options.request_rate, burstiness=options.burstiness, seed=options.seed)
        cpu = time.process_time()
        with _progress(options) as progress:
            task = progress.add_task("Requests", total=n)
            await send_all(
                client,
                bodies[:n],
                records,
                arrivals,
                max_concurrency=options.max_concurrency,
                on_finish=lambda: progress.advance(task),
            )
        cpu = time.process_time() - cpu
        notes += await _settle(records, counter, options)
    notes += _doubts(records, prompts[:n], options)
    metrics = compute(records, percentiles=options.metric_percentiles, goodput=options.goodput, streamed=options.stream)
    if metrics.duration > 1 and cpu / metrics.duration > BUSY_CLIENT:
        notes.append(f"The client used {cpu / metrics.duration:.0%} of a core: it may be what limits the run.")
    if options.max_concurrency and metrics.client_wait is not None and metrics.client_wait.mean > 1:
        notes.append(
            f"Requests waited {metrics.client_wait.mean:.2f} ms in the client on average (--max-concurrency); "
            "no time above includes that."
        )
    return Report(model=model, metrics=metrics, records=records, notes=notes)
