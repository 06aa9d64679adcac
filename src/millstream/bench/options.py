"""The flags of `millstream bench serve`, and the frozen settings they become.

Imports nothing heavy: every start of `millstream` builds this parser.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from typing import Any

from millstream.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DATASETS = ("random", "sharegpt", "chat")
BACKENDS = ("openai-chat", "openai")
ENDPOINTS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}

DEFINITIONS = """\
What is measured (successful requests only; times are the client's, in ms in the table):
  TTFT           time to first token: from the start of the POST (connecting included) to the first
                 chunk with output; the opening chunk that only names the role does not count
  TPOT           time per output token, a value per request: (E2EL - TTFT) / (output tokens - 1), for
                 answers of two tokens or more; mean and percentiles are over requests
  ITL            inter-token latency: the gap between successive output chunks, pooled over all
                 requests; a chunk may hold several tokens, so this is how smoothly text arrives
  per-token gap  (PTG) the gap before a chunk / the tokens in it, once for each of these tokens, pooled
                 over all requests: what ITL would be if every token came in a chunk of its own.
                 Printed with ITL. How many tokens a chunk holds is known where chunks and tokens
                 are equal in number or the server sends usage with every chunk; else the answer's
                 tokens are spread over its chunks by --tokenizer, or by characters
  E2EL           end-to-end latency: from the start of the POST to the last chunk with output
  duration       from the first POST to the last answer's end, ramp and tail included
  throughput     requests, output tokens, input + output tokens / duration; tokens are those of the
                 server's usage (without usage: by the tokenizer, else one for each chunk)
  goodput        requests / duration, of those that kept every limit of --goodput
  percentiles    linear interpolation (numpy's default)

Exit code: 0; 1 if any request failed or the server can't be reached; 2 for a bad flag."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """One benchmark run. Raises ConfigError when flags contradict each other."""

    base_url: str
    model: str | None
    api_key: str | None
    backend: str
    endpoint: str
    dataset_name: str
    dataset_path: str | None
    tokenizer: str | None
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    random_prefix_len: int
    sharegpt_output_len: int | None
    output_len: int
    num_prompts: int
    num_warmups: int
    seed: int
    request_rate: float
    """Requests per second; inf: all at once."""
    burstiness: float
    max_concurrency: int | None
    stream: bool
    ignore_eos: bool
    temperature: float
    extra_body: dict[str, Any]
    percentile_metrics: tuple[str, ...]
    metric_percentiles: tuple[float, ...]
    goodput: dict[str, float]
    """Upper limits in ms by metric."""
    save_result: bool
    save_detailed: bool
    result_dir: str
    result_filename: str | None
    progress: bool

    def __post_init__(self) -> None:
        if self.dataset_name != "random" and self.dataset_path is None:
            raise ConfigError(f"--dataset-path is not given: --dataset-name {self.dataset_name} needs a file")
        if self.dataset_name == "random" and self.dataset_path is not None:
            raise ConfigError("--dataset-path is given, but --dataset-name random makes its own prompts")
        if not self.stream:
            for name in (*self.percentile_metrics, *self.goodput):
                if name != "e2el":
                    raise ConfigError(f"{name} can't be measured with --no-stream: only e2el can")

    @property
    def url(self) -> str:
        return self.base_url + self.endpoint


def _int(low: int) -> Any:
    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is too small: it must be at least {low}")
        return value

    return whole


def _float(low: float, high: float = math.inf, *, is_open: bool = False, below: bool = False) -> Any:
    """A type for argparse: a number from `low` (not itself, if `is_open`) to `high` (not itself, if `below`)."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (value > low if is_open else value >= low):
            raise argparse.ArgumentTypeError(f"{text} must be {'above' if is_open else 'at least'} {low:g}")
        if not (value < high if below else value <= high):
            raise argparse.ArgumentTypeError(f"{text} must be {'below' if below else 'at most'} {high:g}")
        return value

    return number


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a metric: choose from {','.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    between = _float(0, 100)
    return tuple(dict.fromkeys(between(p.strip()) for p in text.split(",") if p.strip()))


def _slo(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOODPUT_METRICS:
        raise argparse.ArgumentTypeError(f"{text!r}: write METRIC:MS with METRIC one of {', '.join(GOODPUT_METRICS)}")
    return name, _float(0)(limit)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `millstream bench serve`, and the definitions of its metrics below the help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = DEFINITIONS
    _add_server(parser.add_argument_group("Server"))
    add_dataset(parser.add_argument_group("Prompts"))
    add_load(parser.add_argument_group("Load"))
    add_report(parser.add_argument_group("Report"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: %(default)s)")
    add("--model", metavar="NAME", help="model to ask (default: the first of the server's /v1/models)")
    add("--api-key", metavar="KEY", help="sent as bearer token")
    add(
        "--backend",
        choices=BACKENDS,
        help="openai-chat: /v1/chat/completions, openai: /v1/completions "
        "(default: openai with --dataset-name random, as chat templates change the length; else openai-chat)",
    )
    add("--endpoint", metavar="PATH", help="path to post to, where it is not the backend's usual one")


def add_dataset(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=DATASETS, default="random", help="where prompts come from (default: %(default)s)")
    add(
        "--dataset-path",
        metavar="FILE",
        help="sharegpt: JSON list of {conversations: [{from, value}, ...]}; chat: text file, a prompt a line",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json (or a folder with one) of the model (default: the server's POST /tokenize, if it has it)",
    )
    add("--random-input-len", type=_int(1), default=1024, metavar="N", help="tokens in a prompt (default: %(default)s)")
    add("--random-output-len", type=_int(1), default=128, metavar="N", help="tokens to ask for (default: %(default)s)")
    add(
        "--random-range-ratio",
        type=_float(0, 1, below=True),
        default=0.0,
        metavar="R",
        help="both lengths vary evenly within len * (1-R) .. len * (1+R) (default: %(default)s)",
    )
    add(
        "--random-prefix-len",
        type=_int(0),
        default=0,
        metavar="N",
        help="tokens that all prompts begin with, on top of the input length (default: %(default)s)",
    )
    add("--sharegpt-output-len", type=_int(1), metavar="N", help="tokens to ask for (default: the dataset's answer)")
    add("--output-len", type=_int(1), default=256, metavar="N", help="chat: tokens to ask for (default: %(default)s)")
    add("--num-prompts", type=_int(1), default=1000, metavar="N", help="requests to send (default: %(default)s)")
    add("--seed", type=_int(0), default=0, metavar="N", help="of prompts, lengths and arrivals (default: %(default)s)")


def add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--request-rate",
        type=_float(0, is_open=True),
        default=math.inf,
        metavar="R",
        help="requests per second, at random times that end at exactly num-prompts / R; inf: all at once "
        "(default: %(default)s)",
    )
    add(
        "--burstiness",
        type=_float(0, is_open=True),
        default=1.0,
        metavar="B",
        help="shape of the gamma distribution of the waits: 1 is Poisson, below burstier, above more even, "
        "inf: constant (default: %(default)s)",
    )
    add("--max-concurrency", type=_int(1), metavar="N", help="requests open at once; more wait in the client")
    add(
        "--num-warmups",
        type=_int(0),
        default=0,
        metavar="N",
        help="requests sent before, not counted (default: %(default)s)",
    )
    add("--no-stream", action="store_true", help="ask for whole answers: only E2EL can be measured then")
    add("--ignore-eos", action="store_true", help="send ignore_eos, so that answers have the length asked for")
    add("--temperature", type=_float(0), default=0.0, metavar="T", help="sampling temperature (default: %(default)s)")
    add(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="fields to add to every request; null takes a field out",
    )


def add_report(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--percentile-metrics",
        type=_metrics,
        metavar="LIST",
        help=f"sections of the table (default: {','.join(METRICS)}; with --no-stream: e2el)",
    )
    add(
        "--metric-percentiles",
        type=_percentiles,
        default=(99.0,),
        metavar="LIST",
        help="percentiles of each metric, such as 50,90,99 (default: 99)",
    )
    add(
        "--goodput",
        type=_slo,
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="also count requests that keep all these limits, such as ttft:200 tpot:50 e2el:5000",
    )
    add("--save-result", action="store_true", help="write the result to a JSON file")
    add("--save-detailed", action="store_true", help="write it with every request's times, lengths, text and error")
    add("--result-dir", default=".", metavar="DIR", help="folder for the file (default: the current one)")
    add("--result-filename", metavar="NAME", help="its name (default: from backend, rate, model and date)")
    add("--no-progress", action="store_true", help="no progress bar on stderr")


def from_args(args: argparse.Namespace) -> BenchOptions:
    """The settings of parsed flags. Raises ConfigError when they contradict each other."""
    backend = args.backend or ("openai" if args.dataset_name == "random" else "openai-chat")
    metrics = args.percentile_metrics
    if metrics is None:
        metrics = ("e2el",) if args.no_stream else METRICS
    base_url = args.base_url.rstrip("/").removesuffix("/v1")
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url is {args.base_url!r}: it must begin with http:// or https://")
    return BenchOptions(
        base_url=base_url,
        model=args.model,
        api_key=args.api_key,
        backend=backend,
        endpoint="/" + (args.endpoint or ENDPOINTS[backend]).lstrip("/"),
        dataset_name=args.dataset_name,
        dataset_path=args.dataset_path,
        tokenizer=args.tokenizer,
        random_input_len=args.random_input_len,
        random_output_len=args.random_output_len,
        random_range_ratio=args.random_range_ratio,
        random_prefix_len=args.random_prefix_len,
        sharegpt_output_len=args.sharegpt_output_len,
        output_len=args.output_len,
        num_prompts=args.num_prompts,
        num_warmups=args.num_warmups,
        seed=args.seed,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        stream=not args.no_stream,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        extra_body=dict(args.extra_body),
        percentile_metrics=metrics,
        metric_percentiles=args.metric_percentiles,
        goodput=dict(args.goodput),
        save_result=args.save_result or args.save_detailed,
        save_detailed=args.save_detailed,
        result_dir=args.result_dir,
        result_filename=args.result_filename,
        progress=not args.no_progress,
    )
