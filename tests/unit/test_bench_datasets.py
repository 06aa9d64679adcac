"""Prompts: exact lengths, deterministic by seed, filters of ShareGPT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from millstream.bench.client import BenchmarkError
from millstream.bench.datasets import RandomShape, chat_prompts, random_prompts, sharegpt_prompts, single_token_words
from millstream.bench.tokens import LocalTokenizer, count_tokens
from millstream.bench.words import WORDS
from millstream.errors import ConfigError


class WordTokenizer:
    """A token a word, `num_special` in front, and one more for the first word of a text if it is in `odd`."""

    def __init__(self, *, num_special: int = 1, odd: Sequence[str] = (), split: Sequence[str] = ()) -> None:
        self.ids = {w: 100 + i for i, w in enumerate(WORDS)}
        self.num_special = num_special
        self.odd = frozenset(odd)
        self.split = frozenset(split)

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(t) for t in texts]

    def _encode(self, text: str) -> list[int]:
        words = text.split()
        ids = list(range(1, self.num_special + 1))
        if words[0] in self.odd:
            ids.append(50)
        for word in words:
            ids += [60, 61] if word in self.split else [self.ids.get(word, 99)]
        return ids


class ByteTokenizer:
    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(t.encode()) for t in texts]


SHAPE = RandomShape(input_len=40, output_len=10)


def test_words_are_common_and_once_each() -> None:
    assert len(WORDS) == len(set(WORDS)) > 300


async def test_words_of_two_tokens_are_found_and_left_out() -> None:
    split = ["the", "moon", "evening", "house"]
    words = await single_token_words(WordTokenizer(split=split))
    assert words == [w for w in WORDS if w not in split]


async def test_random_texts_have_the_exact_length_with_special_tokens() -> None:
    counter = WordTokenizer(num_special=2, odd=WORDS[::2], split=["of"])
    prompts = await random_prompts(SHAPE, n=20, seed=0, counter=counter, can_send_ids=True)
    texts = [p.prompt for p in prompts if isinstance(p.prompt, str)]
    assert await count_tokens(counter, texts) == [40] * 20
    assert {(p.prompt_len, p.output_len) for p in prompts} == {(40, 10)}
    assert len(set(texts)) == 20


async def test_a_prompt_of_one_token() -> None:
    counter = WordTokenizer(num_special=2, odd=WORDS[1:])
    shape = RandomShape(input_len=1, output_len=1)
    prompts = await random_prompts(shape, n=5, seed=0, counter=counter, can_send_ids=False)
    assert [p.prompt for p in prompts] == [WORDS[0]] * 5


async def test_random_chat_texts_have_the_length_without_special_tokens() -> None:
    prompts = await random_prompts(SHAPE, n=3, seed=0, counter=WordTokenizer(num_special=2), can_send_ids=False)
    assert [len(str(p.prompt).split()) for p in prompts] == [40] * 3


async def test_random_is_deterministic_by_seed() -> None:
    shape = RandomShape(input_len=40, output_len=10, range_ratio=0.5)

    async def make(seed: int) -> list[object]:
        return list(await random_prompts(shape, n=8, seed=seed, counter=WordTokenizer(), can_send_ids=True))

    assert await make(5) == await make(5)
    assert await make(5) != await make(6)


async def test_random_lengths_stay_in_range_and_reach_its_ends() -> None:
    shape = RandomShape(input_len=10, output_len=4, range_ratio=0.3)
    prompts = await random_prompts(shape, n=400, seed=0, counter=None, can_send_ids=True)
    assert {p.prompt_len for p in prompts} == set(range(7, 14))
    assert {p.output_len for p in prompts} == {2, 3, 4, 5, 6}


@pytest.mark.parametrize("counter", [None, ByteTokenizer()])
async def test_random_ids_where_text_can_not_be_exact(counter: ByteTokenizer | None) -> None:
    shape = RandomShape(input_len=12, output_len=4, prefix_len=5)
    prompts = await random_prompts(shape, n=6, seed=0, counter=counter, can_send_ids=True)
    for p in prompts:
        assert isinstance(p.prompt, list)
        assert len(p.prompt) == p.prompt_len == 17
        assert p.prompt[:5] == prompts[0].prompt[:5]
        low, high = (1000, 10000) if counter is None else (32, 128)
        assert all(low <= i < high for i in p.prompt)
    assert len({tuple(p.prompt) for p in prompts}) == 6


async def test_special_tokens_are_not_among_random_ids() -> None:
    counter = WordTokenizer(num_special=1, split=WORDS[:-10])
    prompts = await random_prompts(SHAPE, n=20, seed=0, counter=counter, can_send_ids=True)
    used = {i for p in prompts for i in p.prompt}
    assert used
    assert used <= {60, 61, *range(100, 100 + len(WORDS))}


async def test_random_texts_share_a_prefix() -> None:
    shape = RandomShape(input_len=10, output_len=4, prefix_len=6)
    prompts = await random_prompts(shape, n=5, seed=0, counter=WordTokenizer(num_special=0), can_send_ids=True)
    words = [str(p.prompt).split() for p in prompts]
    assert len({tuple(w[:6]) for w in words}) == 1
    assert len({tuple(w[6:]) for w in words}) == 5
    assert {len(w) for w in words} == {16}


@pytest.mark.parametrize("counter", [None, ByteTokenizer()])
async def test_random_chat_without_a_fit_tokenizer_says_what_to_do(counter: ByteTokenizer | None) -> None:
    with pytest.raises(BenchmarkError, match=r"--tokenizer.*--backend openai"):
        await random_prompts(SHAPE, n=1, seed=0, counter=counter, can_send_ids=False)


def sharegpt(path: Path, pairs: Sequence[tuple[int, int]]) -> str:
    """A file of conversations with that many words in prompt and answer."""
    data = [
        {
            "id": f"c{i}",
            "conversations": [
                {"from": "human", "value": " ".join([f"p{i}"] + ["a"] * (p - 1))},
                {"from": "gpt", "value": " ".join(["b"] * a)},
                {"from": "human", "value": "more"},
            ],
        }
        for i, (p, a) in enumerate(pairs)
    ]
    file = path / "sharegpt.json"
    file.write_text(json.dumps(data))
    return str(file)


async def test_sharegpt_filters_and_takes_the_answers_length(tmp_path: Path) -> None:
    fits, total = (1000, 1048), (1000, 1049)
    path = sharegpt(tmp_path, [(3, 50), (4, 4), (1024, 5), (1025, 5), (50, 3), total, fits])
    counter = WordTokenizer(num_special=0)
    prompts = await sharegpt_prompts(path, n=3, seed=0, output_len=None, counter=counter)
    assert {(p.prompt_len, p.output_len) for p in prompts} == {(4, 4), (1024, 5), fits}
    fixed = await sharegpt_prompts(path, n=6, seed=0, output_len=7, counter=counter)
    assert sorted({(p.prompt_len, p.output_len) for p in fixed}) == [(4, 7), (50, 7), (1000, 7), (1024, 7)]


async def test_sharegpt_is_shuffled_by_seed_and_begins_again(tmp_path: Path) -> None:
    path = sharegpt(tmp_path, [(10, 10)] * 12)

    async def make(seed: int, n: int) -> list[str]:
        prompts = await sharegpt_prompts(path, n=n, seed=seed, output_len=None, counter=None)
        return [str(p.prompt).split()[0] for p in prompts]

    assert await make(1, 12) == await make(1, 12)
    assert await make(1, 12) != await make(2, 12)
    again = await make(1, 30)
    assert again[:12] == again[12:24] == await make(1, 12)


async def test_sharegpt_with_nothing_that_fits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no conversation that fits"):
        await sharegpt_prompts(sharegpt(tmp_path, [(2, 9)]), n=1, seed=0, output_len=None, counter=WordTokenizer())
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't be read as ShareGPT"):
        await sharegpt_prompts(str(tmp_path / "bad.json"), n=1, seed=0, output_len=None, counter=None)


async def test_chat_lines_in_order(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("How are you?\n\n  Tell me about the river Seine. \n")
    prompts = await chat_prompts(str(file), n=3, output_len=9, counter=None)
    assert [p.prompt for p in prompts] == ["How are you?", "Tell me about the river Seine.", "How are you?"]
    assert [p.prompt_len for p in prompts] == [4, 8, 4]
    assert prompts[0].output_len == 9
    file.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        await chat_prompts(str(file), n=1, output_len=9, counter=None)


async def test_local_tokenizer_from_a_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(
        models.WordLevel({"<s>": 0, "?": 1, **{w: 2 + i for i, w in enumerate(WORDS)}}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    local = LocalTokenizer(str(tmp_path))
    assert await local.encode(["the of the"]) == [[0, 2, 3, 2]]
    assert local.count_pieces(["the of", "?"]) == [2, 1]
    prompts = await random_prompts(SHAPE, n=4, seed=0, counter=local, can_send_ids=True)
    assert await count_tokens(local, [str(p.prompt) for p in prompts]) == [40] * 4
    with pytest.raises(ConfigError, match="--tokenizer"):
        LocalTokenizer(str(tmp_path / "none.json"))
