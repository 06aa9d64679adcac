"""The same tokens on every road: one request alone, unbatched, unchunked, uncached is the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from millstream import LLM, SamplingParams
from millstream.kernels.native import native_available, native_unavailable_reason
from millstream.messages import EngineOutputs, ModelRunnerOutput
from millstream.sched.scheduler import Scheduler

PROMPTS = [
    "What is the capital of France?",
    "Explain in one sentence how rain forms.",
    "List three animals that live in the sea.",
    "Write a haiku about a mill.",
    "What is 12 times 12?",
    "Who wrote Don Quixote?",
    "Translate 'good morning' to Spanish.",
    "Name the planets of the solar system in order, and tell one fact about each of them that a child would like.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Continue: once upon a time there was a river that",
    "Which is heavier, a kilogram of feathers or a kilogram of iron? Think before you answer, then say why. " * 4,
    "日本の首都はどこですか？",
    "Что такое река?",
    "Tell me a joke about engineers 🙂",
    "Summarise: " + "The stream turns the wheel, the wheel turns the stone, the stone grinds the grain. " * 12,
]
NUM_TOKENS = 16


Answers = list[tuple[list[int], list[float]]]
"""Tokens and their log-probabilities."""


def answers(
    params: SamplingParams | Sequence[SamplingParams],
    *,
    prompts: Sequence[str] = PROMPTS,
    together: bool = True,
    repeat: int = 1,
    **settings: Any,
) -> Answers:
    llm = LLM("smollm2", **{"kv_cache_memory": 0.25, "dtype": "bfloat16", **settings})
    chats = [[{"role": "user", "content": p}] for p in prompts]
    try:
        for _ in range(repeat):
            if together:
                found = llm.chat(chats, params, progress=False)
            else:
                assert isinstance(params, SamplingParams)
                found = [llm.chat(chat, params, progress=False)[0] for chat in chats]
        assert not llm.core.has_work
        llm.core.check_integrity()
        return [(f.token_ids, [x for step in f.answers[0].logprobs for x in step.logprobs]) for f in found]
    finally:
        llm.close()


PARAMS = {
    "greedy": SamplingParams(temperature=0, logprobs=1, max_tokens=NUM_TOKENS),
    "seeded": SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=200,
        seed=7,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        logprobs=1,
        max_tokens=NUM_TOKENS,
    ),
}
ALONE = {
    "together": False,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 2048,
    "async_scheduling": False,
}
ROADS = {
    "batch": {"max_num_batched_tokens": 2048, "enable_prefix_caching": False},
    "512": {"max_num_batched_tokens": 512},
    "64": {"max_num_batched_tokens": 64},
    "16": {"max_num_batched_tokens": 16},
    "cached": {"max_num_batched_tokens": 512, "repeat": 2},
    "five-at-once": {"max_num_batched_tokens": 64, "block_size": 16, "max_num_seqs": 5},
    "one-thread": {"max_num_batched_tokens": 64, "threads": 1},
    "two-stages": {"max_num_batched_tokens": 64, "pipeline_parallel_size": 2},
}
# for pipelines of several stages, which take seconds to start
FEW = PROMPTS[7:12]
FEW_PARAMS = SamplingParams(temperature=0, logprobs=1, max_tokens=24)
# tests/unit/test_ahead.py has all combinations, on a small model
AHEAD = {
    "sync-8-steps": {"async_scheduling": False, "num_scheduler_steps": 8},
    "8-steps": {"num_scheduler_steps": 8, "adaptive_steps": False, "max_num_seqs": 5},
    "two-stages-3-steps": {"num_scheduler_steps": 3, "pipeline_parallel_size": 2},
}
# float32 takes twice as long, and torch's operations ten times
OF_DTYPE = {"bfloat16": PROMPTS, "float32": PROMPTS[1::2]}
OF_KERNELS = {"native": OF_DTYPE, "reference": {"float32": PROMPTS[3:8]}}
# requests of 60 to 270 tokens in a cache that holds so many: they push each other out
TIGHT = {"block_size": 16}
TIGHT_TOKENS = {"native": 400, "reference": 96}


@pytest.fixture(scope="module")
def alone() -> Callable[[str, str, str], Answers]:
    def answer(kernels: str, dtype: str, name: str) -> Answers:
        return answers(PARAMS[name], prompts=OF_KERNELS[kernels][dtype], kernels=kernels, dtype=dtype, **ALONE)

    return functools.cache(answer)


needs_native = pytest.mark.skipif(not native_available(), reason=native_unavailable_reason())


def both(*, dtype: str = "bfloat16", **settings: Any) -> Answers:
    """Each prompt with each of PARAMS, all in one batch."""
    prompts = OF_DTYPE[dtype]
    params = [p for p in PARAMS.values() for _ in prompts]
    return answers(params, prompts=prompts * len(PARAMS), dtype=dtype, **settings)


def both_alone(alone: Callable[[str, str, str], Answers], dtype: str) -> Answers:
    return [answer for name in PARAMS for answer in alone("native", dtype, name)]


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("road", ROADS)
def test_same_bits(alone: Callable[[str, str, str], Answers], dtype: str, road: str) -> None:
    """Tokens and log-probabilities, exactly."""
    assert both(dtype=dtype, **ROADS[road]) == both_alone(alone, dtype)


@needs_native
@pytest.mark.parametrize("road", AHEAD)
def test_same_bits_where_scheduling_runs_ahead(alone: Callable[[str, str, str], Answers], road: str) -> None:
    assert both(**AHEAD[road]) == both_alone(alone, "bfloat16")


@needs_native
@pytest.mark.parametrize("chunk", [1, 7])
def test_same_bits_in_tiny_chunks(alone: Callable[[str, str, str], Answers], chunk: int) -> None:
    some = slice(5, 12)
    found = answers(PARAMS["greedy"], prompts=PROMPTS[some], max_num_batched_tokens=chunk)
    assert found == alone("native", "bfloat16", "greedy")[some]


@pytest.fixture(scope="module")
def few_alone() -> Answers:
    return answers(FEW_PARAMS, prompts=FEW, **ALONE)


@needs_native
@pytest.mark.parametrize("split", ["11,12,7", "3,9,8,10"])
def test_same_bits_over_uneven_stages(few_alone: Answers, split: str) -> None:
    num_stages = split.count(",") + 1
    found = answers(
        FEW_PARAMS,
        prompts=FEW,
        max_num_batched_tokens=64,
        pipeline_parallel_size=num_stages,
        pipeline_layer_split=split,
        threads=num_stages,
    )
    assert found == few_alone


@pytest.mark.parametrize("road", ["512", "16"])
def test_same_tokens_with_torch(alone: Callable[[str, str, str], Answers], road: str) -> None:
    """The reference operations promise equal tokens in float32, not equal bits."""
    found = answers(
        PARAMS["greedy"],
        prompts=OF_KERNELS["reference"]["float32"],
        dtype="float32",
        kernels="reference",
        **ROADS[road],
    )
    reference = alone("reference", "float32", "greedy")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in reference]
    assert [x for _, p in found for x in p] == pytest.approx([x for _, p in reference for x in p], abs=1e-3)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        pytest.param("native", "bfloat16", marks=needs_native),
        pytest.param("native", "float32", marks=needs_native),
        ("reference", "float32"),
    ],
)
def test_same_tokens_after_preemption(
    alone: Callable[[str, str, str], Answers], monkeypatch: pytest.MonkeyPatch, kernels: str, dtype: str
) -> None:
    preempted = 0
    update = Scheduler.update

    def counting(self: Scheduler, result: ModelRunnerOutput) -> EngineOutputs:
        nonlocal preempted
        outputs = update(self, result)
        assert outputs.stats is not None
        preempted += outputs.stats.num_preemptions
        return outputs

    monkeypatch.setattr(Scheduler, "update", counting)
    bytes_per_token = 46080 if dtype == "float32" else 23040
    memory = TIGHT_TOKENS[kernels] * bytes_per_token / 2**30
    found = answers(
        PARAMS["seeded"],
        prompts=OF_KERNELS[kernels][dtype],
        kernels=kernels,
        dtype=dtype,
        kv_cache_memory=memory,
        **TIGHT,
    )
    reference = alone(kernels, dtype, "seeded")
    assert preempted > 0
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in reference]
    if kernels == "native":
        assert found == reference
