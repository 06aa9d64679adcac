"""Settings: where they come from, what they refuse, and which there are."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from millstream.cli import main
from millstream.config import SERVE_SETTINGS, EngineConfig, ServerConfig, add_arguments, serve_settings
from millstream.errors import ConfigError


def settings(
    *flags: str, env: dict[str, str] | None = None, model: str | None = None
) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser()
    add_arguments(parser, *SERVE_SETTINGS)
    return serve_settings(vars(parser.parse_args(flags)), env or {}, model=model)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "millstream.yaml"
    path.write_text("max-num-seqs: 3\nmax_model_len: 100\nenable-prefix-caching: off\nmodel: from-file\nport: 1234\n")
    return path


def test_flag_before_variable_before_file_before_default(file: Path) -> None:
    env = {"MILLSTREAM_MAX_NUM_SEQS": "5", "MILLSTREAM_PORT": "4321", "MILLSTREAM_API_KEY": "secret"}
    engine, server = settings("--config", str(file), "--max-num-seqs", "7", env=env)
    assert engine.scheduler.max_num_seqs == 7
    assert server.port == 4321
    assert engine.model.max_model_len == 100
    assert engine.cache.enable_prefix_caching is False
    assert engine.cache.block_size == 32
    assert server.api_key == "secret"
    assert engine.model.model == "from-file"
    assert settings("--config", str(file), model="given")[0].model.model == "given"
    assert settings("--config", str(file), env={"MILLSTREAM_MODEL": "variable"})[0].model.model == "variable"
    assert settings()[0].model.model == "smollm2"


def test_booleans_have_both_flags() -> None:
    assert settings("--no-enable-prefix-caching")[0].cache.enable_prefix_caching is False
    env = {"MILLSTREAM_ENABLE_PREFIX_CACHING": "no"}
    assert settings(env=env)[0].cache.enable_prefix_caching is False
    assert settings("--enable-prefix-caching", env=env)[0].cache.enable_prefix_caching is True


@pytest.mark.parametrize(
    ("flags", "env", "message"),
    [
        (["--port", "70000"], {}, "--port is 70000: it must be at most 65535"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs is 0: it must be at least 1"),
        (["--kv-cache-memory", "nan"], {}, "--kv-cache-memory is nan: it must be at least 0.001"),
        ([], {"MILLSTREAM_PORT": "many"}, "MILLSTREAM_PORT is 'many': it must be a whole number"),
        ([], {"MILLSTREAM_DTYPE": "int4"}, "--dtype is 'int4': it must be one of auto, float32, bfloat16, float16"),
        ([], {"MILLSTREAM_ENABLE_PREFIX_CACHING": "maybe"}, "MILLSTREAM_ENABLE_PREFIX_CACHING is 'maybe'"),
        (["--config", "/no/such/file.yaml"], {}, "--config /no/such/file.yaml can't be read"),
        (["--pipeline-layer-split", "3,x", "--pipeline-parallel-size", "2"], {}, "--pipeline-layer-split is '3,x'"),
    ],
)
def test_bad_values_are_refused_by_name(flags: list[str], env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*flags, env=env)[0].parallel.layer_split  # noqa: B018
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-sequences: 3", "max-num-sequences in the --config file is not a setting"),
        ("- 1", "must hold settings as `name: value` lines"),
        ("port: [", "can't be read"),
        ("port: x", "port in the --config file is 'x'"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        settings("--config", str(path))


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings()[1].port = 1  # type: ignore[misc]


def test_the_command_tells_mistakes_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert capsys.readouterr().err == "millstream: --port is 70000: it must be at most 65535\n"


def test_the_list_of_settings_is_what_the_documentation_was_written_for() -> None:
    """A new setting is a decision: add it here, and tell users."""
    names = [f.name for cls in SERVE_SETTINGS for f in _fields(cls) if f.metadata]
    assert names == [
        *("dtype", "quantization", "max_model_len", "chat_template", "cache_dir"),
        *("block_size", "kv_cache_memory", "enable_prefix_caching"),
        *("max_num_seqs", "max_num_batched_tokens", "batch_window_ms"),
        *("chunk_policy", "target_tpot_ms", "chunk_pipelining"),
        *("async_scheduling", "num_scheduler_steps", "adaptive_steps", "max_num_waiting"),
        *("threads", "pipeline_parallel_size", "pipeline_layer_split", "watchdog_timeout"),
        *("pin_threads", "device", "hardware", "kernels"),
        "trace",
        *("host", "port", "served_model_name", "api_key", "seed", "repeat_last_n"),
        *("sse_ping_interval", "stream_interval", "api_processes", "enable_debug", "max_request_bytes", "log_level"),
    ]


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)
