"""The same tokens on every road: one request alone, unbatched, unchunked, uncached is the reference."""

from __future__ import annotations

from typing import Any

import pytest

from millstream import LLM, SamplingParams

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
NUM_TOKENS = 24


def answers(params: SamplingParams, *, together: bool = True, repeat: int = 1, **settings: Any) -> list[list[int]]:
    llm = LLM("smollm2", dtype="float32", **{"kv_cache_memory": 0.25, **settings})
    chats = [[{"role": "user", "content": p}] for p in PROMPTS]
    try:
        for _ in range(repeat):
            if together:
                found = llm.chat(chats, params, progress=False)
            else:
                found = [llm.chat(chat, params, progress=False)[0] for chat in chats]
        assert not llm.core.has_work
        llm.core.check_integrity()
        return [f.token_ids for f in found]
    finally:
        llm.close()


GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
SEEDED = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    top_k=200,
    seed=7,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    max_tokens=NUM_TOKENS,
)


@pytest.fixture(scope="module")
def reference() -> dict[str, list[list[int]]]:
    alone = {"together": False, "enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    return {"greedy": answers(GREEDY, **alone), "seeded": answers(SEEDED, **alone)}


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 2048, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 512, "repeat": 2},
        {"max_num_batched_tokens": 64, "block_size": 16, "max_num_seqs": 5},
    ],
    ids=["batch", "512", "64", "16", "cached", "five-at-once"],
)
def test_same_tokens(reference: dict[str, list[list[int]]], params: SamplingParams, settings: dict[str, Any]) -> None:
    assert answers(params, **settings) == reference["greedy" if params is GREEDY else "seeded"]


def test_same_tokens_after_preemption(reference: dict[str, list[list[int]]]) -> None:
    """16 requests of 60 to 270 tokens in a cache that holds 350: they push each other out."""
    llm = LLM("smollm2", dtype="float32", kv_cache_memory=350 * 46080 / 2**30, block_size=4)
    preempted = 0
    scheduler = llm.core.scheduler
    update = scheduler.update

    def counting(result: Any) -> Any:
        nonlocal preempted
        outputs = update(result)
        assert outputs.stats is not None
        preempted += outputs.stats.num_preemptions
        return outputs

    scheduler.update = counting  # type: ignore[method-assign]
    found = llm.chat([[{"role": "user", "content": p}] for p in PROMPTS], GREEDY, progress=False)
    llm.close()
    assert preempted > 0
    assert [f.token_ids for f in found] == reference["greedy"]
