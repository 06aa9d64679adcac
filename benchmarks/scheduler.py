"""Microseconds of schedule() and update() by number of running requests, over a worker that does nothing.

    python benchmarks/scheduler.py [--running 64 1000 10000] [--depth 1] [--chunk-policy fixed] [--steps 50]

All requests decode; what a step costs here is the engine's own time, during which a device might wait. With `--depth P`
there are P steps in flight and one scheduled ahead, so a step of the balanced policy holds a P-th of the requests.
`--waiting` adds requests that find no room, which a step must not pay for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

from millstream.config import SchedulerConfig
from millstream.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.request import Request, SamplingParams
from millstream.sched.factory import make_scheduler
from millstream.sched.scheduler import Scheduler

PROMPT_LEN = 32
BLOCK_SIZE = 32


def answer(step: SchedulerOutput) -> ModelRunnerOutput:
    """A token for each row that wants one."""
    ids = [i for i, wanted in zip(step.request_ids, step.num_sampled_tokens, strict=True) if wanted]
    return ModelRunnerOutput(step.step_id, ids, [[7]] * len(ids), stage_seconds=[0.01])


def make_request(name: str, number: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[number % 1000, number // 1000] + [1] * (PROMPT_LEN - 2),
        sampling_params=SamplingParams(seed=0),
        stop_token_ids=frozenset(),
        max_model_len=4096,
        arrival_time=float(number),
    )


def full_scheduler(args: argparse.Namespace, num_running: int) -> tuple[Scheduler, deque[SchedulerOutput]]:
    """A scheduler with so many requests past their prompts, and its steps in flight."""
    # room for every running request to decode through the whole measurement, and for nobody else
    num_blocks = num_running * (2 + (PROMPT_LEN + 4 * args.steps) // BLOCK_SIZE)
    scheduler = make_scheduler(
        SchedulerConfig(
            max_num_seqs=num_running, max_num_batched_tokens=2 * num_running, chunk_policy=args.chunk_policy
        ),
        WorkerInfo(num_blocks, BLOCK_SIZE, 4096, 1000, [], 0, 0, "float32", {}),
        enable_prefix_caching=True,
        depth=args.depth,
    )
    for number in range(num_running + args.waiting):
        scheduler.add(make_request(f"request-{number}", number))
    in_flight: deque[SchedulerOutput] = deque()
    while any(r.num_output_tokens == 0 for r in list(scheduler.requests.values())[:num_running]):
        turn(scheduler, in_flight)
    return scheduler, in_flight


def turn(scheduler: Scheduler, in_flight: deque[SchedulerOutput]) -> tuple[float, float, int]:
    """Fill the deque as the engine does, settle a step: seconds of schedule() and of update(), rows of the step."""
    start = time.perf_counter()
    depth = scheduler.num_stages + scheduler.async_scheduling
    while len(in_flight) < depth and (step := scheduler.schedule()) is not None:
        in_flight.append(step)
    scheduled = time.perf_counter()
    step = in_flight.popleft()
    result = answer(step)
    answered = time.perf_counter()
    scheduler.update(result)
    return scheduled - start, time.perf_counter() - answered, len(step.request_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 1000, 10000])
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--chunk-policy", choices=("fixed", "balanced"))
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    print(f"{'running':>8} {'rows':>6} {'schedule us':>12} {'update us':>10} {'us per row':>11}")
    for num_running in args.running:
        scheduler, in_flight = full_scheduler(args, num_running)
        turns = [turn(scheduler, in_flight) for _ in range(args.steps)]
        schedule_us, update_us = (statistics.median(t[i] for t in turns) * 1e6 for i in (0, 1))
        rows = statistics.mean(t[2] for t in turns)
        per_row = (schedule_us + update_us) / rows
        print(f"{num_running:>8} {rows:>6.0f} {schedule_us:>12.0f} {update_us:>10.0f} {per_row:>11.2f}")


if __name__ == "__main__":
    main()
