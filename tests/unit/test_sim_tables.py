"""Loads in virtual time against their stored tables: exact, so any change of the scheduler's decisions shows.

Where a change is meant, write the tables anew and look at the difference: python -m tests.unit.test_sim_tables
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from millstream.bench.table import render
from millstream.sim.options import add_arguments, from_args
from millstream.sim.run import make_setup, simulate

FOLDER = Path(__file__).parent / "sim_tables"
LOADS = {
    "chat-one-h100": (
        "--model-card=llama-3.1-8b --hardware=h100-sxm --num-prompts=120 --request-rate=40 --random-input-len=300 "
        "--random-output-len=60 --random-range-ratio=0.8 --random-prefix-len=64 --max-num-seqs=32"
    ),
    "long-prompts-four-4090": (
        "--model-card=qwen2.5-14b --hardware=rtx-4090 --pipeline-parallel-size=4 --num-prompts=12 --request-rate=0.6 "
        "--random-input-len=6000 --random-output-len=60 --random-range-ratio=0.5 --max-num-batched-tokens=2048"
    ),
    "overload-with-preemption": (
        "--model-card=smollm2-135m --hardware=a100-80g --pipeline-parallel-size=2 --kv-cache-memory=0.1 "
        "--num-prompts=60 --random-input-len=200 --random-output-len=150 --random-range-ratio=0.5 --burstiness=0.5 "
        "--request-rate=300"
    ),
    "eight-steps-int8-a100": (
        "--model-card=llama-2-7b --hardware=a100-80g --quantization=int8 --num-scheduler-steps=8 --num-prompts=40 "
        "--request-rate=8 --random-input-len=100 --random-output-len=90 --random-range-ratio=0.6 --stream-interval=2"
    ),
}


def table(name: str) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = from_args(parser.parse_args(LOADS[name].split()), {})
    outcome = simulate(make_setup(options), options.load)
    occupancy = outcome.occupancy
    return (
        render(outcome.report.metrics, sections=("ttft", "tpot", "itl", "e2el"), percentiles=(99.0,))
        + f"\n{occupancy.num_steps} steps, {occupancy.num_preemptions} preemptions, "
        f"{occupancy.num_prefix_hits} tokens cached, KV cache {occupancy.max_kv_usage:.4f}\n"
    )


@pytest.mark.parametrize("name", LOADS)
def test_the_table_is_the_stored_one(name: str) -> None:
    assert table(name) == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for load in LOADS:
        (FOLDER / f"{load}.txt").write_text(table(load))
