"""The seeds' experiments at the scale of the machine at hand: what a feature is worth under a whole load.

    python benchmarks/loads.py streaming    # seed 003: streamed or not, K = 1 and 8, asynchronous or not
    python benchmarks/loads.py turns        # streamed or not, in turn on one server: for a machine that drifts
    python benchmarks/loads.py pipeline     # seed 000: chunks in the pipe one by one, back to back, and balanced
    python benchmarks/loads.py clients      # asynchronous or not, at 1, 16 and 64 clients

Each variant is a server of its own (but for `turns`), started and loaded in turn by `millstream bench serve`; its
tables are printed (and kept in --result-dir), then the variants side by side. Nothing else should run meanwhile;
compare within one run.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from servers import MILLSTREAM, server

Result = dict[str, float]


@dataclass(frozen=True)
class Variant:
    """A server and a load."""

    name: str
    serve: tuple[str, ...]
    bench: tuple[str, ...]


def server_times(url: str) -> tuple[float, float]:
    """The server's own times per output token: their sum in ms, and of how many answers. It knows them for answers that
    are not streamed as well."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text = reply.read().decode()
    found = {k: float(v) for k, v in re.findall(r"time_per_output_token_seconds_(sum|count)\S* (\S+)", text)}
    return 1000 * found.get("sum", 0.0), found.get("count", 0.0)


def server_tpot(before: tuple[float, float], after: tuple[float, float]) -> float:
    """The mean time per output token of the answers between two calls of `server_times`, in ms."""
    count = after[1] - before[1]
    return (after[0] - before[0]) / count if count else float("nan")


def run(variant: Variant, folder: Path) -> Result:
    """Start the server, load it, print the table; the figures."""
    print(f"\n# {variant.name}: serve {' '.join(variant.serve)}; bench serve {' '.join(variant.bench)}", flush=True)
    name = re.sub(r"\W+", "-", variant.name) + ".json"
    command = [*MILLSTREAM, "bench", "serve", "--no-progress", "--ignore-eos", "--save-result"]
    with server(*variant.serve) as url:
        # the first steps fit the cost model, fault memory in and open the connections
        warm_up = ["--num-warmups", "4", "--base-url", url, "--result-dir", str(folder), "--result-filename", name]
        subprocess.run([*command, *variant.bench, *warm_up], check=True)
        tpot = server_tpot((0.0, 0.0), server_times(url))
    found: Result = {k: v for k, v in json.loads((folder / name).read_text()).items() if isinstance(v, int | float)}
    return found | {"server_tpot_ms": tpot}


COLUMNS = {
    "duration s": "duration",
    "output tok/s": "output_throughput",
    "TTFT": "mean_ttft_ms",
    "P99": "p99_ttft_ms",
    "TPOT": "mean_tpot_ms",
    "P99 ": "p99_tpot_ms",
    "ITL": "mean_itl_ms",
    "P99  ": "p99_itl_ms",
    "E2EL": "mean_e2el_ms",
    "P99   ": "p99_e2el_ms",
    "TPOT by the server": "server_tpot_ms",
}


def compare(results: dict[str, Result]) -> None:
    """The variants side by side, as a table in Markdown; times in ms."""
    print("\n| | " + " | ".join(name.strip() for name in COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for name, result in results.items():
        cells = [f"{result[key]:.1f}" if key in result else "-" for key in COLUMNS.values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def ratio(results: dict[str, Result], text: str, key: str, above: str, below: str) -> None:
    if key in results.get(above, {}) and key in results.get(below, {}):
        print(f"{text}: {results[above][key] / results[below][key]:.3f} ({above} / {below})")


def streaming(args: argparse.Namespace) -> None:
    load = ("--num-prompts", str(args.num_prompts or 200), "--random-input-len", "215", "--random-output-len", "197")
    results = {}
    for is_async in (False, True):
        for num_steps in (1, 8):
            serve = (
                "--async-scheduling" if is_async else "--no-async-scheduling",
                *("--num-scheduler-steps", str(num_steps)),
            )
            for is_streamed in (False, True):
                kind = f"{'async' if is_async else 'sync'} K={num_steps}"
                name = f"{kind} {'streamed' if is_streamed else 'whole'}"
                bench = load if is_streamed else (*load, "--no-stream")
                results[name] = run(Variant(name, serve, bench), args.result_dir)
    compare(results)
    for kind in ("sync K=1", "sync K=8", "async K=1", "async K=8"):
        streamed, whole = f"{kind} streamed", f"{kind} whole"
        ratio(results, f"{kind}: TPOT, streamed to whole", "server_tpot_ms", streamed, whole)
        ratio(results, f"{kind}: duration, streamed to whole", "duration", streamed, whole)
        print(f"{kind}: ITL to TPOT: {results[streamed]['mean_itl_ms'] / results[streamed]['mean_tpot_ms']:.3f}")
    for num_steps in (1, 8):
        one, other = f"async K={num_steps} streamed", f"sync K={num_steps} streamed"
        ratio(results, f"K={num_steps}: output tok/s, async to sync", "output_throughput", one, other)


def turns(args: argparse.Namespace) -> None:
    load = ("--num-prompts", str(args.num_prompts or 200), "--random-input-len", "215", "--random-output-len", "197")
    command = [*MILLSTREAM, "bench", "serve", "--no-progress", "--ignore-eos", "--num-warmups", "4", *load]
    for num_steps in (1, 8):
        ratios = []
        with server("--num-scheduler-steps", str(num_steps)) as url:
            for i in range(args.rounds):
                tpot = {"whole": 0.0, "streamed": 0.0}
                # within a round the machine's drift is the same for both; other prompts each time, lest they are cached
                for k, name in enumerate(("whole", "streamed", "streamed", "whole")):
                    before = server_times(url)
                    kind = ["--no-stream"] if name == "whole" else []
                    bench = [*command, *kind, "--base-url", url, "--seed", str(4 * i + k)]
                    subprocess.run(bench, check=True, stdout=subprocess.DEVNULL)
                    tpot[name] += server_tpot(before, server_times(url)) / 2
                ratios.append(tpot["streamed"] / tpot["whole"])
                print(
                    f"K={num_steps}: TPOT by the server {tpot['streamed']:.1f} ms streamed, {tpot['whole']:.1f} whole: "
                    f"{ratios[-1]:.3f}",
                    flush=True,
                )
        print(f"K={num_steps}: streamed to whole, median of {args.rounds} rounds: {statistics.median(ratios):.3f}")


def pipeline(args: argparse.Namespace) -> None:
    # 2,250 to 6,750 tokens in, 100 to 300 out
    load = (
        *("--num-prompts", str(args.num_prompts or 32), "--request-rate", str(args.request_rate)),
        *("--random-input-len", "4500", "--random-output-len", "200", "--random-range-ratio", "0.5"),
    )
    stages = ("--pipeline-parallel-size", "2")
    variants = [
        Variant("before", (*stages, "--no-chunk-pipelining", "--chunk-policy", "fixed", "--no-async-scheduling"), load),
        Variant("fixed chunks", (*stages, "--chunk-policy", "fixed"), load),
        Variant("after", stages, load),
        Variant("after, 1024 tokens", (*stages, "--max-num-batched-tokens", "1024"), load),
    ]
    results = {v.name: run(v, args.result_dir) for v in variants if v.name not in args.without}
    compare(results)
    for metric in ("ttft", "tpot", "e2el", "itl"):
        for key in (f"mean_{metric}_ms", f"p99_{metric}_ms"):
            ratio(results, key, key, "before", "after")


def clients(args: argparse.Namespace) -> None:
    results = {}
    for count, prompts, tokens_in, tokens_out in ((1, 4, 57, 256), (16, 48, 56, 512), (64, 128, 215, 200)):
        load = (
            *("--num-prompts", str(args.num_prompts or prompts), "--max-concurrency", str(count)),
            *("--random-input-len", str(tokens_in), "--random-output-len", str(tokens_out)),
        )
        for flag in ("--no-async-scheduling", "--async-scheduling"):
            name = f"{count} clients {'sync' if flag.startswith('--no') else 'async'}"
            results[name] = run(Variant(name, (flag,), load), args.result_dir)
    compare(results)
    for count in (1, 16, 64):
        one, other = f"{count} clients async", f"{count} clients sync"
        ratio(results, f"{count} clients: output tok/s", "output_throughput", one, other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("streaming", "turns", "pipeline", "clients"))
    parser.add_argument("--num-prompts", type=int, help="in place of the experiment's own number")
    parser.add_argument(
        "--request-rate", type=float, default=0.115, help="of the pipeline's load: make it about 70 %% of capacity"
    )
    parser.add_argument("--without", nargs="*", default=[], help="variants of the pipeline's load to leave out")
    parser.add_argument("--rounds", type=int, default=4, help="of `turns` (default: %(default)s)")
    parser.add_argument("--result-dir", type=Path, default=Path("results"))
    args = parser.parse_args()
    args.result_dir.mkdir(parents=True, exist_ok=True)
    {"streaming": streaming, "turns": turns, "pipeline": pipeline, "clients": clients}[args.experiment](args)


if __name__ == "__main__":
    main()
