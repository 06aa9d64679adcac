"""How well the simulator predicts this machine: both tables for three loads, and predicted / measured.

    python benchmarks/truth.py [--stages 1 2] [--rounds 3] [OPTION ...]

For each number of stages it starts a server. Each round lets `bench serve` and `simulate` have the same loads, with
prompts that the server has not seen. A shared machine changes its speed from one minute to the next: so it is measured
(`simulate --calibrate`, with the threads that a stage has, beside the idle server) before and after each round, and
what is predicted is the mean of what the two profiles say; a figure is the median over the rounds, and so is the ratio
of the two figures of each round. OPTIONs go to `serve` and `simulate`
alike: --no-async-scheduling, --num-scheduler-steps 8, --quantization int8. Run it where nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from servers import MILLSTREAM, server

LOADS = {
    "one client": "--max-concurrency 1 --random-input-len 256 --random-output-len 64",
    "16 clients": "--max-concurrency 16 --random-input-len 128 --random-output-len 64",
    "2 a second": "--request-rate 2 --random-input-len 512 --random-output-len 48 --random-range-ratio 0.5",
}
NUM_PROMPTS = {"one client": 16, "16 clients": 96, "2 a second": 48}
SETTINGS = ["--kv-cache-memory", "1", "--max-num-batched-tokens", "256"]
FIGURES = {
    "tok/s": "output_throughput",
    "mean TTFT": "mean_ttft_ms",
    "P99 TTFT": "p99_ttft_ms",
    "mean TPOT": "mean_tpot_ms",
    "mean ITL": "mean_itl_ms",
    "P99 ITL": "p99_itl_ms",
    "mean E2EL": "mean_e2el_ms",
}

Result = dict[str, float]


def run(*args: str) -> None:
    """A command of millstream; raises RuntimeError with what it printed where it fails."""
    done = subprocess.run(
        [*MILLSTREAM, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"millstream {' '.join(args)} has failed:\n{done.stdout}")


def result_of(command: list[str], load: list[str], folder: Path) -> Result:
    path = folder / "result.json"
    saved = ["--no-progress", "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"]
    run(*command, *load, *saved, "--result-dir", str(folder), "--result-filename", path.name)
    result: Result = json.loads(path.read_text())
    return result


def compare(num_stages: int, options: list[str], *, model: str, rounds: int, share: float) -> None:
    """Measure and predict all loads, and print the table."""
    threads = len(os.sched_getaffinity(0)) // num_stages
    kind = ["--quantization", "int8"] if "int8" in options else []
    profile = f"this-cpu-{threads}" + ("-int8" if kind else "")
    calibrate = ["simulate", "--calibrate", "--model", model, "--threads", str(threads), *kind]
    settings = [*SETTINGS, "--pipeline-parallel-size", str(num_stages), *options]
    simulate = ["simulate", "--model", model, "--hardware", profile, *settings]
    pairs: dict[str, list[tuple[Result, Result]]] = {name: [] for name in LOADS}
    with tempfile.TemporaryDirectory() as folder, server(model, *settings) as url:
        bench = ["bench", "serve", "--base-url", url, "--ignore-eos", "--num-warmups", "1"]
        run(*calibrate)
        for i in range(rounds):
            loads = {}
            for k, (name, flags) in enumerate(LOADS.items()):
                num_prompts = max(1, round(NUM_PROMPTS[name] * share))
                # a seed that no load had before: the server would find its prompts in the cache
                loads[name] = [*flags.split(), "--num-prompts", str(num_prompts), "--seed", str(i * len(LOADS) + k)]
            before = {name: result_of(simulate, load, Path(folder)) for name, load in loads.items()}
            real = {name: result_of(bench, load, Path(folder)) for name, load in loads.items()}
            run(*calibrate)
            after = {name: result_of(simulate, load, Path(folder)) for name, load in loads.items()}
            for name in LOADS:
                said = {key: (before[name][key] + after[name][key]) / 2 for key in FIGURES.values()}
                pairs[name].append((real[name], said))
    print(f"\n{num_stages} stages, {threads} threads each, {' '.join(options) or 'default settings'}")
    print(f"{'':12}{'':11}{'measured':>10} {'predicted':>10} {'ratio':>6}   predicted / measured, lowest to highest")
    for name in LOADS:
        for title, key in FIGURES.items():
            measured, predicted = (
                statistics.median(result[key] for result in results) for results in zip(*pairs[name], strict=True)
            )
            ratios = sorted(said[key] / real[key] for real, said in pairs[name])
            spread = f"{ratios[0]:.2f} - {ratios[-1]:.2f}"
            print(f"{name:12}{title:11}{measured:10.1f} {predicted:10.1f} {statistics.median(ratios):6.2f}   {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of each load's requests, for a quick look")
    parser.add_argument("--model", default="smollm2")
    args, options = parser.parse_known_args()
    for num_stages in args.stages:
        compare(num_stages, options, model=args.model, rounds=args.rounds, share=args.share)


if __name__ == "__main__":
    main()
