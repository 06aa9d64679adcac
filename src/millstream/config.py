"""Every setting, once: frozen dataclasses that give the flags, the YAML keys and the variables.

A setting is taken from the first of: the command line (`--max-num-seqs 64`), the variable
`MILLSTREAM_MAX_NUM_SEQS`, the YAML file of `--config` (`max-num-seqs: 64`), the default here.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union

from millstream.errors import ConfigError

DEFAULT_MODEL = "smollm2"
ENV_PREFIX = "MILLSTREAM_"


def _setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
) -> Any:
    return field(
        default=default,
        metadata={"help": help, "choices": choices, "low": low, "high": high, "secret": secret},
    )


@dataclass(frozen=True, kw_only=True)
class _Settings:
    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, meta = getattr(self, f.name), f.metadata
            if value is None or not meta:
                continue
            flag = flag_of(f.name)
            if meta["choices"] and value not in meta["choices"]:
                raise ConfigError(f"{flag} is {value!r}: it must be one of {', '.join(meta['choices'])}")
            low, high = meta["low"], meta["high"]
            if low is not None and not value >= low:
                raise ConfigError(f"{flag} is {value}: it must be at least {low}")
            if high is not None and not value <= high:
                raise ConfigError(f"{flag} is {value}: it must be at most {high}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Settings):
    """Which weights, in which type."""

    model: str = DEFAULT_MODEL
    """An alias (`smollm2`), a folder with config.json and safetensors, a .gguf file, or a hub id."""
    dtype: str = _setting(
        "auto",
        "type to compute in; auto: the checkpoint's 16-bit type, bfloat16 for quantised files",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = _setting(
        None, "int8: 8-bit weights and activations in linear layers, faster and a little less exact", choices=("int8",)
    )
    max_model_len: int | None = _setting(None, "longest prompt plus answer, in tokens (default: the model's)", low=2)
    chat_template: str | None = _setting(None, "file with a Jinja chat template to use instead of the model's")
    cache_dir: str | None = _setting(None, "where fetched models lie (default: ~/.cache/millstream)")


@dataclass(frozen=True, kw_only=True)
class CacheConfig(_Settings):
    """The paged KV cache."""

    block_size: int = _setting(32, "tokens in a block of the KV cache", low=1, high=1024)
    kv_cache_memory: float | None = _setting(
        None, "GiB for the KV cache (default: a quarter of the free memory, at most 4)", low=0.001
    )
    enable_prefix_caching: bool = _setting(True, "reuse the keys and values of prompts that begin alike")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(_Settings):
    """How many requests and tokens a step holds."""

    max_num_seqs: int = _setting(256, "requests running at once, at most", low=1, high=65536)
    max_num_batched_tokens: int = _setting(512, "tokens in one step, at most: prompts are cut into such chunks", low=1)
    batch_window_ms: float = _setting(
        0.0, "when idle, wait this long after a request for more, so that they start as one batch", low=0, high=60000
    )
    chunk_policy: str | None = _setting(
        None,
        "fixed: steps of up to --max-num-batched-tokens; balanced: of equal predicted time (default: balanced with "
        "several stages, fixed with one)",
        choices=("fixed", "balanced"),
    )
    target_tpot_ms: float | None = _setting(
        None, "balanced steps are small enough for a next token every so many milliseconds", low=0.1
    )
    chunk_pipelining: bool = _setting(
        True, "compute a prompt's next chunk in the first stage while the one before is in a later stage"
    )
    async_scheduling: bool = _setting(
        True, "schedule a next token before the one in the making is known, so that no worker waits for the engine"
    )
    num_scheduler_steps: int = _setting(
        1, "tokens of each answer for one scheduling decision; each is streamed as it is made", low=1, high=1024
    )
    adaptive_steps: bool = _setting(True, "decide for one token at a time while prompts are waiting or being computed")
    max_num_waiting: int = _setting(4096, "requests in the queue, at most; more are answered with 429", low=1)

    @property
    def max_num_open(self) -> int:
        """Requests that run or wait, at most."""
        return self.max_num_seqs + self.max_num_waiting


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(_Settings):
    """How the work is spread over cores."""

    threads: int | None = _setting(
        None, "compute threads of all pipeline stages together (default: one for each core)", low=1, high=1024
    )
    pipeline_parallel_size: int = _setting(
        1, "stages: processes that hold a slice of the layers each, with the chunks of a prompt flowing through", low=1
    )
    pipeline_layer_split: str | None = _setting(
        None, "layers of each stage, first to last, like 8,8,7,7 (default: by estimated time)"
    )
    watchdog_timeout: float = _setting(
        30.0, "with pipeline stages: seconds after which a stage that does not answer counts as hung", low=1, high=86400
    )
    pin_threads: bool = _setting(
        False, "keep each compute thread on one core: a few percent faster where nothing else wants the cores"
    )
    device: str = _setting(
        "cpu", "cpu, or sim: answers of made-up words in the time that --hardware would take", choices=("cpu", "sim")
    )
    hardware: str = _setting(
        "instant", "what --device sim simulates (`millstream simulate --list`), or a profile's file"
    )
    kernels: str = _setting(
        "auto",
        "native: C++; reference: torch; auto: native where it can compute the model",
        choices=("auto", "native", "reference"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        split, num_stages = self.layer_split, self.pipeline_parallel_size
        if split is not None and len(split) != num_stages:
            raise ConfigError(
                f"--pipeline-layer-split is {self.pipeline_layer_split}, {len(split)} stages: "
                f"--pipeline-parallel-size is {num_stages}"
            )

    @property
    def layer_split(self) -> tuple[int, ...] | None:
        """The layers of each stage, where they were set by hand."""
        if self.pipeline_layer_split is None:
            return None
        try:
            sizes = tuple(int(part) for part in self.pipeline_layer_split.split(","))
        except ValueError:
            sizes = (0,)
        if min(sizes) < 1:
            raise ConfigError(
                f"--pipeline-layer-split is {self.pipeline_layer_split!r}: it must be numbers of layers, "
                "1 or more for each stage, with commas between them"
            )
        return sizes


@dataclass(frozen=True, kw_only=True)
class TraceConfig(_Settings):
    """What the engine writes down about itself."""

    trace: str | None = _setting(
        None,
        "file that gets what each stage does when, for Perfetto and `millstream trace`; it grows with every step",
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All that the engine and its workers need to know."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(_Settings):
    """The HTTP side."""

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0: any free one", low=0, high=65535)
    served_model_name: str | None = _setting(None, "name that clients use for the model (default: MODEL's last part)")
    api_key: str | None = _setting(None, "clients must send this as a bearer token", secret=True)
    seed: int | None = _setting(None, "base for requests that give no seed of their own (default: drawn at start)")
    repeat_last_n: int = _setting(
        -1, "penalties look at the last n tokens, where a request does not say; -1: all", low=-1
    )
    sse_ping_interval: float = _setting(
        15.0, "seconds between the comments that keep a quiet stream's connection open; 0: none", low=0, high=86400
    )
    stream_interval: int = _setting(
        1, "tokens in a chunk of a stream, at least; the first comes at once, the last with what is there", low=1
    )
    api_processes: int = _setting(
        1, "processes that answer HTTP, for when one is the bottleneck: about 25,000 streamed tokens/s", low=1, high=64
    )
    enable_debug: bool = _setting(False, "answer POST /debug/trace/start and /debug/trace/stop")
    max_request_bytes: int = _setting(8 * 2**20, "largest request body, in bytes", low=1024)
    log_level: str | None = _setting(None, "how much to log", choices=("debug", "info", "warning", "error"))


T = TypeVar("T")
SERVE_SETTINGS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, TraceConfig, ServerConfig)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _settings(cls: type) -> list[tuple[dataclasses.Field[Any], type]]:
    """The fields of `cls` that are settings, each with its type (None stripped)."""
    hints = typing.get_type_hints(cls)
    found = []
    for f in dataclasses.fields(cls):
        if not f.metadata:
            continue
        kind = hints[f.name]
        if typing.get_origin(kind) in (Union, types.UnionType):
            kind = next(a for a in typing.get_args(kind) if a is not type(None))
        found.append((f, kind))
    return found


def add_arguments(parser: argparse.ArgumentParser, *classes: type) -> None:
    """Add a flag for every setting of `classes`, and `--config`."""
    parser.add_argument("--config", metavar="FILE.yaml", help="YAML file with settings, named like the flags")
    for cls in classes:
        group = parser.add_argument_group((cls.__doc__ or cls.__name__).strip().rstrip("."))
        for f, kind in _settings(cls):
            text = f.metadata["help"]
            if f.default is not None and not f.metadata["secret"]:
                text += f" (default: {f.default})"
            if kind is bool:
                group.add_argument(flag_of(f.name), action=argparse.BooleanOptionalAction, default=None, help=text)
            else:
                group.add_argument(
                    flag_of(f.name),
                    type=kind,
                    default=None,
                    choices=f.metadata["choices"] or None,
                    metavar=None if f.metadata["choices"] else kind.__name__.upper(),
                    help=text,
                )


def read_yaml(path: str | None) -> dict[str, Any]:
    """The settings in a YAML file, with `_` for `-` in their names."""
    if path is None:
        return {}
    import yaml  # most starts read no file

    try:
        data = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"--config {path} can't be read: {e}") from e
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path} must hold settings as `name: value` lines")
    return {str(k).replace("-", "_"): v for k, v in data.items()}


_KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _convert(value: Any, kind: type, source: str) -> Any:
    """`value` from a YAML file or variable as `kind`; raises ConfigError naming `source`."""
    text = str(value).strip()
    try:
        if kind is bool:
            return _BOOLS[text.lower()]
        return kind(text)
    except (KeyError, ValueError) as e:
        raise ConfigError(f"{source} is {value!r}: it must be {_KINDS[kind]}") from e


def build(cls: type[T], *, args: Mapping[str, Any], env: Mapping[str, str], file: Mapping[str, Any], **fixed: Any) -> T:
    """One settings object from flags, variables and a file's keys, in that order of precedence."""
    values: dict[str, Any] = dict(fixed)
    for f, kind in _settings(cls):
        variable = ENV_PREFIX + f.name.upper()
        if args.get(f.name) is not None:
            values[f.name] = args[f.name]
        elif variable in env:
            values[f.name] = _convert(env[variable], kind, variable)
        elif file.get(f.name) is not None:
            values[f.name] = _convert(file[f.name], kind, f"{f.name.replace('_', '-')} in the --config file")
    return cls(**values)


def check_file_keys(file: Mapping[str, Any], *classes: type) -> None:
    """Raise ConfigError for a key of a YAML file that is no setting of `classes` (or `model`)."""
    known = {f.name for cls in classes for f, _ in _settings(cls)} | {"model"}
    for key in file:
        if key not in known:
            raise ConfigError(f"{key.replace('_', '-')} in the --config file is not a setting")


def serve_settings(
    args: Mapping[str, Any], env: Mapping[str, str], *, model: str | None = None
) -> tuple[EngineConfig, ServerConfig]:
    """The settings of `millstream serve` (and of the commands that share them)."""
    file = read_yaml(args.get("config"))
    check_file_keys(file, *SERVE_SETTINGS)
    chosen = model or env.get(ENV_PREFIX + "MODEL") or file.get("model") or DEFAULT_MODEL
    engine = EngineConfig(
        model=build(ModelConfig, args=args, env=env, file=file, model=chosen),
        cache=build(CacheConfig, args=args, env=env, file=file),
        scheduler=build(SchedulerConfig, args=args, env=env, file=file),
        parallel=build(ParallelConfig, args=args, env=env, file=file),
        trace=build(TraceConfig, args=args, env=env, file=file),
    )
    return engine, build(ServerConfig, args=args, env=env, file=file)
