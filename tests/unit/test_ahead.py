"""Scheduling that runs ahead: the same bits as one decision for each token, made when the one before is known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from millstream.config import CacheConfig
from millstream.executor.base import Wake
from millstream.request import FinishReason, SamplingParams, nth_seed
from tests.pipeline_helpers import VOCAB, Answer, Pipeline, Session, always_readable, engine_config, save_tiny_model

_random = random.Random(11)
PROMPTS = [[_random.randrange(3, VOCAB) for _ in range(n)] for n in (5, 90, 33, 1, 70)]
# the last one begins like the second: it finds its prefix
PROMPTS.append(PROMPTS[1][:64] + PROMPTS[2])
# no multiples of the numbers of steps below
PARAMS = [
    SamplingParams(temperature=0, max_tokens=37, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=29, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, max_tokens=13, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.7, seed=6, frequency_penalty=0.5, top_k=20, max_tokens=27, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=8, top_p=0.9, min_tokens=3, max_tokens=22, logprobs=1, ignore_eos=True),
]
REQUESTS = list(zip(PROMPTS, PARAMS, strict=True))
# three answers to one prompt
REQUESTS += [
    (PROMPTS[0], SamplingParams(temperature=1, seed=nth_seed(21, i), max_tokens=75, ignore_eos=True)) for i in range(3)
]
STOP_AT = 10
STOPPED = (1, 3, 5)
"""Requests that run a second time, with a stop at their token number STOP_AT."""

Expected = tuple[list[tuple[list[int], SamplingParams]], list[Answer]]


def alone(pipeline: Pipeline, prompt: list[int], params: SamplingParams) -> Answer:
    """One request, one token a decision, nothing cached, the prompt in one piece."""
    session = Session(pipeline.core(cache=CacheConfig(enable_prefix_caching=False), async_scheduling=False))
    session.add(prompt, params)
    return session.run()[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module", params=[1, 2])
def pipeline(model: Path, request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    pipeline = Pipeline(engine_config(model, pipeline_parallel_size=request.param))
    yield pipeline
    pipeline.executor.shutdown()


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    whole = Pipeline(engine_config(model))
    requests = list(REQUESTS)
    answers = [alone(whole, *request) for request in requests]
    for i in STOPPED:
        prompt, params = REQUESTS[i]
        stop = answers[i][0][STOP_AT]
        stopped = SamplingParams(
            **{f: getattr(params, f) for f in params.__struct_fields__} | {"stop_token_ids": (stop,)}
        )
        requests.append((prompt, stopped))
        answers.append(alone(whole, prompt, stopped))
        assert params.min_tokens < len(answers[-1][0]) <= STOP_AT + 1
    whole.executor.shutdown()
    return requests, answers


@pytest.fixture(scope="module")
def wake() -> Iterator[Wake]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    readable, sender = always_readable(context)
    yield readable
    readable.close()
    sender.close()
    context.term()


@pytest.mark.parametrize("num_blocks", [None, 9], ids=["room", "tight"])
@pytest.mark.parametrize("chunk", [16, 128])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 8])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_the_same_bits(
    pipeline: Pipeline, expected: Expected, ahead: bool, num_steps: int, chunk: int, num_blocks: int | None
) -> None:
    core = pipeline.core(
        chunk=chunk,
        num_blocks=num_blocks,
        async_scheduling=ahead,
        num_scheduler_steps=num_steps,
        # where room is tight someone is always waiting, which would make decisions short
        adaptive_steps=num_blocks is None,
    )
    session = Session(core)
    requests, answers = expected
    for prompt, params in requests:
        session.add(prompt, params)
    assert session.run() == answers
    # 12 requests of up to 120 tokens in 144 places
    assert (session.num_preemptions > 0) == (num_blocks is not None)


@pytest.mark.parametrize("num_steps", [4, 8])
@pytest.mark.parametrize("after", [1, 3, 6])
@pytest.mark.parametrize("adaptive", [False, True])
def test_an_abort_within_a_decision_changes_nothing_for_others(
    pipeline: Pipeline, expected: Expected, wake: Wake, num_steps: int, after: int, adaptive: bool
) -> None:
    session = Session(pipeline.core(chunk=64, num_scheduler_steps=num_steps, adaptive_steps=adaptive))
    requests, answers = expected
    for prompt, params in requests:
        session.add(prompt, params)
    victim = list(session.requests.values())[1]
    session.run_until(lambda: victim.num_output_tokens >= after, wake)
    assert session.core.abort(victim.request_id)
    # its prefix and its blocks are taken up at once
    session.add(*requests[1])
    found = session.run()
    assert victim.finish_reason is FinishReason.ABORT
    del found[1]
    assert found == [*answers[:1], *answers[2:], answers[1]]


def test_many_steps_are_one_decision(pipeline: Pipeline) -> None:
    """What the matrix compares does take the roads that it says."""
    core = pipeline.core(num_scheduler_steps=8, async_scheduling=True)
    session = Session(core)
    session.add(PROMPTS[0], SamplingParams(temperature=0, max_tokens=33, ignore_eos=True))
    num_results = 0
    decisions = set()
    while core.has_work:
        session.step()
        assert core.last_step is not None
        num_results += 1
        decisions.add(core.last_step.step_id)
    assert num_results == 33
    # the prompt's step, while it waits, is a decision of its own; then four of 8 tokens
    assert len(decisions) == 5
