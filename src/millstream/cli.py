"""The `millstream` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from millstream import __version__
from millstream.config import DEFAULT_MODEL, SERVE_SETTINGS, CacheConfig, ModelConfig, add_arguments, serve_settings
from millstream.errors import ConfigError, DownloadError, MillstreamError, ModelError
from millstream.log import configure


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except MillstreamError as e:
        print(f"millstream: {e}", file=sys.stderr)
        return 2 if isinstance(e, (ConfigError, ModelError)) and not isinstance(e, DownloadError) else 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millstream", description="Serve open-weight language models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"millstream {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _serve(commands)
    _chat(commands)
    _pull(commands)
    _check(commands)
    _bench(commands)
    _simulate(commands)
    _trace(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


_MODEL_HELP = "an alias (smollm2), a folder with config.json and safetensors, a .gguf file, or a hub id"


# Each command imports what it needs when it runs, so that none pays for the others' libraries.


def _serve(commands: Any) -> None:
    def run(args: argparse.Namespace) -> int:
        engine, server = serve_settings(vars(args), os.environ, model=args.model)
        configure(server.log_level)
        from millstream.server.launch import launch

        return launch(engine, server)

    parser = _command(commands, "serve", run, "serve a model over an OpenAI-compatible API")
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{_MODEL_HELP} (default: {DEFAULT_MODEL})")
    add_arguments(parser, *SERVE_SETTINGS)


def _chat(commands: Any) -> None:
    def run(args: argparse.Namespace) -> int:
        from millstream.chat import run_chat

        return run_chat(
            args.base_url,
            model=args.model,
            api_key=args.api_key or os.environ.get("MILLSTREAM_API_KEY"),
            system=args.system,
            temperature=args.temperature,
            max_tokens=args.max_tokens,
        )

    parser = _command(commands, "chat", run, "talk with a running server")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int)


def _pull(commands: Any) -> None:
    def run(args: argparse.Namespace) -> int:
        from millstream.hub.pull import pull

        print(pull(args.model, cache_dir=args.cache_dir).path)
        return 0

    parser = _command(commands, "pull", run, "fetch a model")
    parser.add_argument("model", metavar="MODEL", help="an alias (smollm2) or a hub id (ORG/NAME)")
    parser.add_argument("--cache-dir", help="where to put it (default: ~/.cache/millstream)")


def _check(commands: Any) -> None:
    def run(args: argparse.Namespace) -> int:
        engine, _ = serve_settings(vars(args), os.environ, model=args.model)
        from millstream.check import check

        return check(engine)

    parser = _command(commands, "check", run, "show what serving a model would take, without loading it")
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{_MODEL_HELP} (default: {DEFAULT_MODEL})")
    add_arguments(parser, ModelConfig, CacheConfig)


def _bench(commands: Any) -> None:
    from millstream.bench import serve as bench_serve

    parser = _command(commands, "bench", lambda args: 0, "measure a server")
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    serve = kinds.add_parser(
        "serve",
        help="load an OpenAI-compatible server and print the Serving Benchmark Result",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    bench_serve.add_arguments(serve)
    serve.set_defaults(run=bench_serve.run)


def _simulate(commands: Any) -> None:
    from millstream.sim import command

    parser = _command(
        commands,
        "simulate",
        lambda args: command.run(args, os.environ),
        "run the scheduler on simulated hardware and print the Serving Benchmark Result",
    )
    command.add_arguments(parser)


def _trace(commands: Any) -> None:
    def run(args: argparse.Namespace) -> int:
        from millstream.sim.trace import show_trace

        return show_trace(args.file, plot=args.plot)

    parser = _command(commands, "trace", run, "say how busy the stages were, from a trace")
    parser.add_argument("file", metavar="FILE", help="what `serve --trace` or `simulate --trace` has written")
    parser.add_argument("--plot", metavar="FILE", help="draw the timeline as well, as .png or .svg")


if __name__ == "__main__":
    sys.exit(main())
