"""Where prompts come from: random ones of exact lengths, ShareGPT conversations, or the lines of a text file."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from millstream.bench.client import BenchmarkError
from millstream.bench.tokens import TokenCounter, count_tokens
from millstream.bench.words import WORDS
from millstream.errors import ConfigError

MIN_LEN = 4
MAX_PROMPT_LEN = 1024
MAX_TOTAL_LEN = 2048
MAX_TEXT_LEN = 65536
"""Characters."""
MIN_WORDS = 64
NUM_STARTERS = 16
MAX_CORRECTIONS = 4
SAFE_IDS = range(1000, 10000)
"""Plain text in every usual model: above bytes and special tokens, below the end of the smallest vocabularies."""
COUNT_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """A prompt to send: text, or token ids."""

    prompt: str | list[int]
    prompt_len: int
    """Tokens, by the tokenizer at hand (the server's own count replaces it in the result)."""
    output_len: int
    """Tokens to ask for."""


class _Turn(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


async def chat_prompts(path: str, *, n: int, output_len: int, counter: TokenCounter | None) -> list[BenchPrompt]:
    """The lines of a text file in order, empty ones left out, from the start again until there are `n`.

    Raises ConfigError if the file can't be read or holds no line.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--dataset-path {path} can't be read: {e}") from e
    lines = [line for line in lines if line][:n]
    if not lines:
        raise ConfigError(f"--dataset-path {path} holds no prompt: it must be a text file with a prompt on each line")
    lens = await count_tokens(counter, lines)
    prompts = [
        BenchPrompt(prompt=line, prompt_len=num, output_len=output_len) for line, num in zip(lines, lens, strict=True)
    ]
    return [prompts[i % len(prompts)] for i in range(n)]


async def sharegpt_prompts(
    path: str, *, n: int, seed: int, output_len: int | None, counter: TokenCounter | None
) -> list[BenchPrompt]:
    """The first two turns of conversations, shuffled by `seed`, until there are `n` (from the start again if short).

    Left out: prompts of fewer than 4 or more than 1024 tokens, answers of fewer than 4, and pairs above 2048. The
    answer's length is the dataset's unless `output_len` is given. Raises ConfigError if the file can't be read or
    nothing is left.
    """
    try:
        data = msgspec.json.decode(Path(path).read_bytes(), type=list[_Conversation])
    except (OSError, msgspec.MsgspecError) as e:
        raise ConfigError(f"--dataset-path {path} can't be read as ShareGPT conversations: {e}") from e
    pairs = [(c.conversations[0].value, c.conversations[1].value) for c in data if len(c.conversations) >= 2]
    # What can't fit anyway isn't worth counting, and servers refuse to tokenize nothing.
    pairs = [p for p in pairs if all(t.strip() and len(t) <= MAX_TEXT_LEN for t in p)]
    random.Random(seed).shuffle(pairs)
    chosen: list[BenchPrompt] = []
    at_once = min(COUNT_AT_ONCE, max(2 * n, 1))
    for begin in range(0, len(pairs), at_once):
        some = pairs[begin : begin + at_once]
        prompt_lens = await count_tokens(counter, [p for p, _ in some])
        answer_lens = await count_tokens(counter, [a for _, a in some])
        for (prompt, _), prompt_len, answer_len in zip(some, prompt_lens, answer_lens, strict=True):
            wanted = output_len or answer_len
            if (
                MIN_LEN <= prompt_len <= MAX_PROMPT_LEN
                and (output_len is not None or answer_len >= MIN_LEN)
                and prompt_len + wanted <= MAX_TOTAL_LEN
            ):
                chosen.append(BenchPrompt(prompt=prompt, prompt_len=prompt_len, output_len=wanted))
        if len(chosen) >= n:
            break
    if not chosen:
        raise ConfigError(
            f"--dataset-path {path} holds no conversation that fits: prompts of {MIN_LEN} to {MAX_PROMPT_LEN} tokens, "
            f"with their answers at most {MAX_TOTAL_LEN}"
        )
    return [chosen[i % len(chosen)] for i in range(n)]


@dataclass(frozen=True, kw_only=True)
class RandomShape:
    """The lengths of random prompts, in tokens: each within len * (1 - range_ratio) .. len * (1 + range_ratio)."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    """All prompts begin with these tokens, on top of input_len."""

    def draw(self, n: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """The input and output lengths of `n` requests."""
        return self._draw(self.input_len, n, rng), self._draw(self.output_len, n, rng)

    def _draw(self, length: int, n: int, rng: np.random.Generator) -> list[int]:
        low = max(1, math.floor(length * (1 - self.range_ratio)))
        high = math.ceil(length * (1 + self.range_ratio))
        return [int(x) for x in rng.integers(low, high + 1, size=n)]


async def random_prompts(
    shape: RandomShape, *, n: int, seed: int, counter: TokenCounter | None, can_send_ids: bool
) -> list[BenchPrompt]:
    """`n` prompts of random words with exact token counts; equal for equal `seed` and tokenizer.

    Text is preferred, so that the server tokenizes as it does for users: words that are one token each, checked and
    corrected with `counter`. Where that can't be (no counter, or its vocabulary lacks such words) token ids are sent,
    if the endpoint takes them (`can_send_ids`); special tokens count in the length of completions prompts
    (`can_send_ids`), and a chat template's come on top. Raises BenchmarkError if neither is possible.
    """
    rng = np.random.default_rng(seed)
    input_lens, output_lens = shape.draw(n, rng)
    lens = [shape.prefix_len + x for x in input_lens]
    prompts: Sequence[str | list[int]] | None = None
    if counter is not None:
        words = await single_token_words(counter)
        if len(words) >= MIN_WORDS:
            overhead = await _overhead(counter)
            targets = lens if can_send_ids else [x + overhead for x in lens]
            if min(targets) > overhead:
                prompts = await _texts(targets, overhead, words, shape.prefix_len, rng, counter)
    if prompts is None and can_send_ids:
        prompts = await _ids(lens, shape.prefix_len, rng, counter)
    if prompts is None:
        why = "the server has no POST /tokenize" if counter is None else "its tokenizer knows too few English words"
        raise BenchmarkError(
            f"--dataset-name random with a chat endpoint needs prompts of exact lengths as text, but {why}: "
            "give --tokenizer, or use --backend openai, which can send token ids"
        )
    return [
        BenchPrompt(prompt=p, prompt_len=i, output_len=o) for p, i, o in zip(prompts, lens, output_lens, strict=True)
    ]


async def single_token_words(counter: TokenCounter) -> list[str]:
    """Those of WORDS that are one token inside a text, found by halving the list."""

    async def search(words: Sequence[str]) -> list[str]:
        # The second copy stands inside a text, and the difference cancels special tokens.
        once, twice = await counter.encode([" ".join(words), " ".join([*words, *words])])
        num_tokens = len(twice) - len(once)
        if num_tokens == len(words):
            return list(words)
        if len(words) == 1 or num_tokens > 2.5 * len(words):
            return []
        middle = len(words) // 2
        return await search(words[:middle]) + await search(words[middle:])

    return await search(WORDS)


async def _overhead(counter: TokenCounter) -> int:
    """Special tokens that the tokenizer adds to a text."""
    once, twice = await counter.encode([" ".join(WORDS), " ".join([*WORDS, *WORDS])])
    return max(0, 2 * len(once) - len(twice))


async def _texts(
    targets: Sequence[int],
    overhead: int,
    words: Sequence[str],
    prefix_len: int,
    rng: np.random.Generator,
    counter: TokenCounter,
) -> list[str] | None:
    """Texts of `targets` tokens each; None if the tokenizer can't be met exactly."""
    # A word may need more tokens at the start of a text, where no space stands before it.
    some = words[:NUM_STARTERS]
    starters = [w for w, n in zip(some, await count_tokens(counter, some), strict=True) if n == overhead + 1] or some

    def draw(n: int, *, is_start: bool = False) -> list[str]:
        drawn = [words[i] for i in rng.integers(0, len(words), size=n)]
        return [starters[int(rng.integers(0, len(starters)))], *drawn[1:]] if is_start and drawn else drawn

    prefix = draw(prefix_len, is_start=True)
    bodies = [draw(max(1, target - overhead - prefix_len), is_start=not prefix) for target in targets]
    texts = [" ".join(prefix + body) for body in bodies]
    wrong = list(range(len(texts)))
    for _ in range(MAX_CORRECTIONS):
        counts = await count_tokens(counter, [texts[i] for i in wrong])
        missing = {i: targets[i] - c for i, c in zip(wrong, counts, strict=True) if targets[i] != c}
        for i, num in missing.items():
            body = bodies[i]
            bodies[i] = body + draw(num) if num > 0 else body[: max(1, len(body) + num)]
            texts[i] = " ".join(prefix + bodies[i])
        wrong = list(missing)
        if not wrong:
            return texts
    return None


async def _ids(
    lens: Sequence[int], prefix_len: int, rng: np.random.Generator, counter: TokenCounter | None
) -> list[list[int]]:
    """Prompts of token ids: those of English words where a tokenizer is at hand, else a range that is plain text."""
    pool = list(SAFE_IDS)
    if counter is not None:
        (ids,) = await counter.encode([" ".join(WORDS)])
        overhead = await _overhead(counter)
        # The ends may be special tokens; what they hold of the words occurs elsewhere too.
        pool = sorted(set(ids[overhead : len(ids) - overhead]) - {*ids[:overhead], *ids[len(ids) - overhead :]})
    prefix = [pool[i] for i in rng.integers(0, len(pool), size=prefix_len)]
    return [prefix + [pool[i] for i in rng.integers(0, len(pool), size=n - prefix_len)] for n in lens]
