"""The flags of `millstream simulate`: those of `bench serve` for load and report, those of the scheduler, and its own.

Imports nothing heavy: every start of `millstream` builds this parser.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from millstream.bench import options as bench
from millstream.bench.options import BenchOptions
from millstream.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    build,
    check_file_keys,
    read_yaml,
)
from millstream.config import add_arguments as add_settings
from millstream.errors import ConfigError

DEFAULT_HARDWARE = "h100-sxm"
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_SWEEP_RUNS = 1000


# what a recorded load has of its own, and the defaults of these flags
_REPLACED_BY_REPLAY: dict[str, object] = {
    "dataset_name": "random",
    "random_input_len": 1024,
    "random_output_len": 128,
    "random_range_ratio": 0.0,
    "random_prefix_len": 0,
    "num_prompts": 1000,
    "request_rate": math.inf,
    "burstiness": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The request rates to try, rising."""

    rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """One `millstream simulate`. Raises ConfigError when flags contradict each other."""

    load: BenchOptions
    engine: EngineConfig
    model: str | None
    model_card: str | None
    hardware: str
    overrides: dict[str, str]
    tensor_parallel_size: int
    stream_interval: int
    replay: str | None
    trace: str | None
    plot: str | None
    sweep: Sweep | None
    slo_share: float

    def __post_init__(self) -> None:
        if (self.model is None) == (self.model_card is None):
            raise ConfigError("give either --model-card NAME or --model MODEL")
        if self.plot is not None and not self.plot.endswith((".png", ".svg")):
            raise ConfigError(f"--plot is {self.plot!r}: it must end in .png or .svg")
        if self.sweep is not None and self.trace is not None:
            raise ConfigError("--trace is of one run: it can't be given with --sweep")
        if self.replay is not None:
            if self.sweep is not None:
                raise ConfigError("--replay has its own arrivals: it can't be given with --sweep")
            for name, default in _REPLACED_BY_REPLAY.items():
                if getattr(self.load, name) != default:
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError(f"{flag} can't be given with --replay, which has its own lengths and arrivals")

    @property
    def model_name(self) -> str:
        return self.model_card or str(self.model)


def _sweep(text: str) -> Sweep:
    name, _, numbers = text.partition("=")
    try:
        low, high, step = (float(n) for n in numbers.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write request-rate=FROM:TO:STEP") from None
    if name != "request-rate":
        raise argparse.ArgumentTypeError(f"{name!r} can't be swept: only request-rate can")
    if not (0 < low <= high < math.inf and 0 < step < math.inf and (high - low) / step < MAX_SWEEP_RUNS):
        raise argparse.ArgumentTypeError(
            f"{text!r}: it must be 0 < FROM <= TO and STEP over 0, at most {MAX_SWEEP_RUNS} runs"
        )
    count = int((high - low) / step + 1e-9) + 1
    return Sweep(rates=tuple(round(low + i * step, 9) for i in range(count)))


def _override(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=NUMBER")
    return name.replace("-", "_"), value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be over 0 and at most 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `millstream simulate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = bench.DEFINITIONS
    _add_device(parser.add_argument_group("What runs on what"))
    _add_output(parser.add_argument_group("Beyond the table"))
    bench.add_dataset(parser.add_argument_group("Prompts"))
    bench.add_load(parser.add_argument_group("Load"))
    bench.add_report(parser.add_argument_group("Report"))
    add_settings(parser, CacheConfig, SchedulerConfig)


def _add_device(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model-card", metavar="NAME", help="a built-in shape, such as qwen2.5-32b (--list tells all)")
    add("--model", metavar="MODEL", help="a config.json, its folder, or whatever serve takes: only headers are read")
    add("--cache-dir", metavar="DIR", help="where fetched models lie (default: ~/.cache/millstream)")
    add(
        "--hardware",
        default=DEFAULT_HARDWARE,
        metavar="NAME",
        help="a hardware profile, or a .json file with one (default: %(default)s; --list tells all)",
    )
    add(
        "--set",
        type=_override,
        nargs="+",
        default=[],
        metavar="NAME=NUMBER",
        help="replace numbers of the hardware profile, such as compute_scale=0.8",
    )
    add("--dtype", choices=DTYPES, default="auto", help="type of weights and KV cache (default: the model's)")
    add(
        "--quantization",
        choices=("int8",),
        help="int8: 8-bit weights in linear layers; with --calibrate the profile's name ends in -int8",
    )
    add("--max-model-len", type=_count, metavar="N", help="longest prompt plus answer (default: the model's)")
    add("--pipeline-parallel-size", type=_count, default=1, metavar="P", help="stages (default: %(default)s)")
    add("--pipeline-layer-split", metavar="N,N,...", help="layers of each stage (default: by estimated time)")
    add("--tensor-parallel-size", type=_count, default=1, metavar="T", help="devices a stage (default: %(default)s)")
    add(
        "--stream-interval",
        type=_count,
        default=1,
        metavar="N",
        help="tokens in a chunk of a streamed answer; the first comes alone (default: %(default)s)",
    )
    add("--list", action="store_true", help="print the built-in shapes and hardware profiles, and end")
    add(
        "--calibrate",
        action="store_true",
        help="measure this machine with --model, write the profile this-cpu, and end (takes up to a minute)",
    )
    add(
        "--threads",
        type=_count,
        metavar="N",
        help="with --calibrate: compute threads; the profile is called this-cpu-N (default: one for each core)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--replay",
        metavar="FILE",
        help="a recorded load in place of prompts and rate: a JSON line {at, input_len, output_len} for each request "
        "(--list tells the built-in ones)",
    )
    add("--trace", metavar="FILE", help="write what each stage did when, for Perfetto or chrome://tracing")
    add("--plot", metavar="FILE", help="draw timeline, KV cache and latencies (or the sweep's curves): .png or .svg")
    add(
        "--sweep",
        type=_sweep,
        metavar="request-rate=FROM:TO:STEP",
        help="one run for each rate; with --goodput also the highest rate that keeps its limits",
    )
    add(
        "--slo-share",
        type=_share,
        default=0.9,
        metavar="S",
        help="share of the requests that must keep the limits of --goodput (default: %(default)s)",
    )


def load_options(args: argparse.Namespace) -> BenchOptions:
    """The load's part of the flags. Raises ConfigError for those that a simulated device can't honour."""
    for name, neutral in (("num_warmups", 0), ("temperature", 0.0), ("extra_body", {})):
        if getattr(args, name) != neutral:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} changes nothing on a simulated device: it needs a real server")
    model = args.model_card or args.model
    server = {"base_url": "http://simulated", "api_key": None, "backend": "openai", "endpoint": None, "model": model}
    options = bench.from_args(argparse.Namespace(**{**vars(args), **server}))
    # answers always have the length asked for
    return dataclasses.replace(options, backend="simulated", ignore_eos=True)


def from_args(args: argparse.Namespace, env: Mapping[str, str]) -> SimOptions:
    """The settings of parsed flags. Raises ConfigError when they contradict each other."""
    if args.threads is not None:
        raise ConfigError("--threads is for --calibrate: a simulated device has none")
    values, file = vars(args), read_yaml(args.config)
    check_file_keys(file, CacheConfig, SchedulerConfig)
    engine = EngineConfig(
        model=ModelConfig(
            model=args.model or str(args.model_card),
            dtype=args.dtype,
            quantization=args.quantization,
            max_model_len=args.max_model_len,
            cache_dir=args.cache_dir,
        ),
        cache=build(CacheConfig, args=values, env=env, file=file),
        scheduler=build(SchedulerConfig, args=values, env=env, file=file),
        parallel=ParallelConfig(
            pipeline_parallel_size=args.pipeline_parallel_size, pipeline_layer_split=args.pipeline_layer_split
        ),
    )
    return SimOptions(
        load=load_options(args),
        engine=engine,
        model=args.model,
        model_card=args.model_card,
        hardware=args.hardware,
        overrides=dict(args.set),
        tensor_parallel_size=args.tensor_parallel_size,
        stream_interval=args.stream_interval,
        replay=args.replay,
        trace=args.trace,
        plot=args.plot,
        sweep=args.sweep,
        slo_share=args.slo_share,
    )
