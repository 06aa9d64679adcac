"""Pipelines of worker processes: the same bits as one process, whatever is cut, shared, pushed out or aborted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from millstream.config import CacheConfig
from millstream.executor.base import Wake
from millstream.request import FinishReason, Request, RequestStatus, SamplingParams
from tests.pipeline_helpers import (
    BLOCK_SIZE,
    MAX_TOKENS,
    VOCAB,
    Answer,
    Pipeline,
    Session,
    always_readable,
    engine_config,
    save_tiny_model,
)

NUM_NEW = 40
_random = random.Random(3)
PROMPTS = [[_random.randrange(3, VOCAB) for _ in range(n)] for n in (5, 90, 33, 1, 70)]
# the last one begins like the second: it finds its prefix
PROMPTS.append(PROMPTS[1][:64] + PROMPTS[2])
PARAMS = [
    SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=NUM_NEW, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.7, seed=6, frequency_penalty=0.5, top_k=20, max_tokens=NUM_NEW, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=8, top_p=0.9, min_tokens=3, max_tokens=NUM_NEW, logprobs=1, ignore_eos=True),
]

# P, type to compute in, layers of each stage
KINDS = {
    "2-float32": {"pipeline_parallel_size": 2, "dtype": "float32"},
    "3-bfloat16": {"pipeline_parallel_size": 3, "dtype": "bfloat16", "pipeline_layer_split": "1,2,1"},
    "4-float32": {"pipeline_parallel_size": 4, "dtype": "float32"},
    "2-bfloat16-uneven": {"pipeline_parallel_size": 2, "dtype": "bfloat16", "pipeline_layer_split": "3,1"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def reference(model: Path) -> dict[str, list[Answer]]:
    """Each request alone, in one process, its prompt in one piece, nothing cached."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        whole = Pipeline(engine_config(model, dtype=dtype))
        found[dtype] = []
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            session = Session(whole.core(cache=CacheConfig(enable_prefix_caching=False), async_scheduling=False))
            session.add(prompt, params)
            found[dtype] += session.run()
        whole.executor.shutdown()
    assert len({tuple(answer[0]) for answer in found["float32"]}) == len(PROMPTS)
    assert found["float32"] != found["bfloat16"]
    return found


class Case:
    def __init__(self, pipeline: Pipeline, expected: list[Answer]) -> None:
        self.pipeline = pipeline
        self.expected = expected

    def session(self, **settings: Any) -> Session:
        return Session(self.pipeline.core(**settings))


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def case(request: pytest.FixtureRequest, model: Path, reference: dict[str, list[Answer]]) -> Iterator[Case]:
    pipeline = Pipeline(engine_config(model, **request.param))
    yield Case(pipeline, reference[request.param["dtype"]])
    pipeline.executor.shutdown()


@pytest.fixture(scope="module")
def wake() -> Iterator[Wake]:
    context: zmq.Context[Any] = zmq.Context()
    sockets = always_readable(context)
    yield sockets[0]
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def add_all(session: Session) -> None:
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        session.add(prompt, params)


@pytest.mark.parametrize("chunk", [7, 16, 64, MAX_TOKENS])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cache": CacheConfig(enable_prefix_caching=False)},
        {"chunk_policy": "fixed"},
        {"chunk_pipelining": False},
    ],
    ids=["balanced", "uncached", "fixed", "unpipelined"],
)
def test_same_tokens_and_logprobs(case: Case, chunk: int, settings: dict[str, Any]) -> None:
    session = case.session(chunk=chunk, **settings)
    add_all(session)
    assert session.run() == case.expected


def test_same_tokens_with_a_cached_prompt(case: Case) -> None:
    session = case.session(chunk=32)
    add_all(session)
    session.run()
    session.answers.clear()
    add_all(session)
    again = list(session.requests.values())[len(PROMPTS) :]
    assert session.run() == case.expected
    assert again[1].num_cached_tokens == 90 // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("chunk", [16, MAX_TOKENS])
def test_same_tokens_after_preemption(case: Case, chunk: int) -> None:
    session = case.session(chunk=chunk, num_blocks=13)
    add_all(session)
    assert session.run() == case.expected
    assert session.num_preemptions > 0


def test_one_running_slot_and_tiny_chunks(case: Case) -> None:
    session = case.session(chunk=4, max_num_seqs=1)
    add_all(session)
    assert session.run() == case.expected


def test_chunks_of_one_prompt_are_in_flight_together(case: Case, wake: Wake) -> None:
    session = case.session(chunk=16, max_num_seqs=1, chunk_policy="fixed")
    request = session.add(PROMPTS[1], PARAMS[0])
    session.step(wake)
    # one chunk for each stage, and one that is waiting
    assert request.num_in_flight_tokens + request.num_computed_tokens == 16 * (case.pipeline.executor.depth + 1)
    session.run()


# where a long prompt (90 tokens in chunks of 16) is when it is aborted
PHASES: dict[str, Callable[[Request], bool]] = {
    "waiting": lambda r: r.status is RequestStatus.WAITING,
    "first-chunk": lambda r: r.num_scheduled_until > 0,
    "last-chunk": lambda r: r.num_tokens == 90 and r.num_pending_tokens > 0,
    "decode": lambda r: r.num_output_tokens == 3 and r.num_in_flight_tokens > 0,
}


@pytest.mark.parametrize("phase", PHASES)
def test_aborting_a_neighbour_changes_nothing(case: Case, wake: Wake, phase: str) -> None:
    session = case.session(chunk=16)
    for i in (0, 2, 3):
        session.add(PROMPTS[i], PARAMS[i])
    victim = session.add(PROMPTS[1], PARAMS[1])
    session.add(PROMPTS[4], PARAMS[4])
    session.run_until(lambda: PHASES[phase](victim), wake)
    assert session.core.abort(victim.request_id)
    session.add(PROMPTS[1], PARAMS[1])  # takes up the blocks that it left, and its prefix
    answers = session.run()
    assert victim.finish_reason is FinishReason.ABORT
    del answers[3]
    assert answers == [case.expected[i] for i in (0, 2, 3, 4, 1)]


def test_aborting_all_of_them_leaves_nothing(case: Case, wake: Wake) -> None:
    session = case.session(chunk=16)
    add_all(session)
    session.run_until(lambda: any(r.num_output_tokens > 2 for r in session.requests.values()), wake)
    for name in session.requests:
        session.core.abort(name)
    session.run()
    add_all(session)
    assert session.run()[len(PROMPTS) :] == case.expected
