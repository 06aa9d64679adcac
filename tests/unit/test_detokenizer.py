"""Text deltas: joined they are the decoded text, cut at the first stop string, however the tokens arrive."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from millstream.engine.detokenizer import Detokenizer, TextDelta

SAMPLE = "The café 👩‍👩‍👧 says: 日本語のテキスト、中文 😀😃 and e\u0301 naïve — stop here. END of <text>\n\n"


@dataclass
class TinyTokenizer:
    backend: Tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids


@functools.cache
def byte_level() -> TinyTokenizer:
    """Byte-level BPE whose merges run across characters, as those of real vocabularies do."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([SAMPLE, "日本日本語日日語語テキ中文日文", "hello world the end " * 3], trainer)
    return TinyTokenizer(backend)


@functools.cache
def byte_fallback() -> TinyTokenizer:
    """As Llama 2's: words begin with U+2581, other characters are tokens like <0xE6>, a first space is stripped."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "\u2581",
        "\u2581the",
        "\u2581end",
        "a",
        "b",
    ]
    backend = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.add_special_tokens([AddedToken(w, special=True) for w in words[:3]])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TinyTokenizer(backend)


def byte_id(byte: int) -> int:
    """The byte-level token of one byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    char = chr(byte) if byte in printable else chr(256 + others.index(byte))
    found = byte_level().backend.token_to_id(char)
    assert found is not None
    return int(found)


def run(detokenizer: Detokenizer, pushes: Sequence[Sequence[int]]) -> tuple[str, list[TextDelta]]:
    deltas = [detokenizer.push(ids) for ids in pushes]
    return "".join(d.text for d in deltas) + detokenizer.finish(), deltas


def cut(ids: list[int], cuts: Sequence[int]) -> list[list[int]]:
    ends = sorted({min(c, len(ids)) for c in cuts} | {len(ids)})
    return [ids[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, int, str] | None:
    """(end, begin, stop string) of the stop string that is complete first."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    return min(found) if found else None


token_ids = st.lists(st.integers(0, 329), max_size=60)
cuts = st.lists(st.integers(0, 60), max_size=12)
stops = st.lists(
    st.one_of(
        st.text(alphabet="abehlnot d日語\ufffd", min_size=1, max_size=3),
        st.integers(0, len(SAMPLE) - 5).flatmap(lambda i: st.integers(1, 5).map(lambda n: SAMPLE[i : i + n])),
    ),
    max_size=3,
).map(tuple)


def texts_as_ids(text: str) -> list[int]:
    return byte_level().encode(text)


some_ids = st.one_of(
    token_ids,
    st.text(alphabet=SAMPLE, max_size=80).map(texts_as_ids),
    st.lists(st.integers(0x78, 0xFF).map(byte_id), max_size=60),
    st.just([byte_id(0xFF)] * 100),
)


@settings(max_examples=300, deadline=None)
@given(ids=some_ids, cuts=cuts, prompt=st.one_of(st.just([]), token_ids), skip=st.booleans())
@example(ids=[byte_id(0xE6), 0, 0, byte_id(0x97), 0, byte_id(0xA5)], cuts=[1, 3], prompt=[byte_id(0xE6)], skip=True)
def test_joined_deltas_are_the_decoded_text(ids: list[int], cuts: list[int], prompt: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(byte_level(), prompt, skip_special_tokens=skip)
    text, deltas = run(detokenizer, cut(ids, cuts))
    assert text == byte_level().decode(ids, skip_special_tokens=skip)
    assert sum(d.num_tokens for d in deltas) == len(ids)


@settings(max_examples=300, deadline=None)
@given(ids=some_ids, cuts=cuts, stop=stops, prompt=st.one_of(st.just([]), token_ids))
def test_text_ends_at_the_first_stop_string(
    ids: list[int], cuts: list[int], stop: tuple[str, ...], prompt: list[int]
) -> None:
    whole = byte_level().decode(ids)
    text, deltas = run(Detokenizer(byte_level(), prompt, stop=stop), cut(ids, cuts))
    first = first_stop(whole, stop)
    assert text == (whole if first is None else whole[: first[1]])
    if first is not None and deltas and deltas[-1].stop is not None:
        assert deltas[-1].stop in stop
        assert whole[first[1] :].startswith(deltas[-1].stop)
        # the token that completed the stop string is the last to count
        num_tokens = sum(d.num_tokens for d in deltas)
        assert first_stop(byte_level().decode(ids[:num_tokens]), stop) is not None


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=SAMPLE, max_size=60), cuts=cuts, stop=stops, min_tokens=st.integers(0, 30))
def test_no_stop_string_ends_before_min_tokens(
    text: str, cuts: list[int], stop: tuple[str, ...], min_tokens: int
) -> None:
    ids = texts_as_ids(text)
    detokenizer = Detokenizer(byte_level(), [], stop=stop, min_tokens=min_tokens)
    found, _ = run(detokenizer, cut(ids, cuts))
    # whole characters known before the first token that may end the answer
    num_exempt = len(byte_level().decode(ids[: max(0, min_tokens - 1)]).rstrip("\ufffd"))
    if len(ids) < min_tokens:
        num_exempt = len(text)
    ends = [
        (i + len(s), i) for s in stop for i in range(len(text)) if text.startswith(s, i) and i + len(s) > num_exempt
    ]
    assert found == (text[: min(ends)[1]] if ends else text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab \n日本é😀", max_size=40), cuts=cuts)
def test_byte_fallback_tokens_give_whole_characters(text: str, cuts: list[int]) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text.replace(" ", "\u2581"))
    prompt = tokenizer.encode("\u2581the")
    joined, deltas = run(Detokenizer(tokenizer, prompt), cut(ids, cuts))
    assert joined == text
    assert "\ufffd" not in "".join(d.text for d in deltas)
    assert run(Detokenizer(tokenizer, []), cut(ids, cuts))[0] == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 263), st.integers(257, 263)), max_size=60), cuts=cuts)
def test_broken_byte_fallback_tokens_lose_no_words(ids: list[int], cuts: list[int]) -> None:
    tokenizer = byte_fallback()
    words = {260: "the", 261: "end", 262: "a", 263: "b"}
    joined, _ = run(Detokenizer(tokenizer, []), cut(ids, cuts))
    position = 0
    for i in ids:
        if i in words:
            position = joined.find(words[i], position) + len(words[i])
            assert position >= len(words[i])
    assert joined == run(Detokenizer(tokenizer, []), [[i] for i in ids])[0]


@pytest.mark.parametrize("text", ["日本語 😀", "👩‍👩‍👧 e\u0301", "naïve — café"])
def test_streamed_pieces_hold_no_half_character(text: str) -> None:
    _, deltas = run(Detokenizer(byte_level(), []), [[byte_id(b)] for b in text.encode()])
    pieces = [d.text for d in deltas]
    assert "".join(pieces) == text
    assert all(p in ("", c) for p, c in zip(pieces, _expected_pieces(text), strict=True))


def _expected_pieces(text: str) -> list[str]:
    """For each byte the character that is complete with it."""
    return [c if k == len(c.encode()) - 1 else "" for c in text for k in range(len(c.encode()))]


def test_endless_invalid_bytes_keep_streaming() -> None:
    detokenizer = Detokenizer(byte_level(), [])
    pieces = [detokenizer.push([byte_id(0xFF)]).text for _ in range(200)]
    assert len("".join(pieces)) == 197
    assert detokenizer.finish() == "\ufffd" * 3


def test_incomplete_character_is_flushed_once() -> None:
    detokenizer = Detokenizer(byte_level(), texts_as_ids("hello"))
    assert detokenizer.push([*texts_as_ids("hi "), *map(byte_id, "😀".encode()[:3])]).text == "hi "
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    assert detokenizer.push(texts_as_ids("x")) == ("", 0, None)


def test_prompt_that_ends_within_a_character_is_not_shown() -> None:
    detokenizer = Detokenizer(byte_level(), [*texts_as_ids("hello "), byte_id(0xE6)])
    assert run(detokenizer, [texts_as_ids("end")])[0] == "end"


def test_space_between_prompt_and_answer_is_kept() -> None:
    tokenizer = byte_fallback()
    the, end = tokenizer.backend.token_to_id("\u2581the"), tokenizer.backend.token_to_id("\u2581end")
    assert Detokenizer(tokenizer, [1, the]).push([end]).text == " end"
    assert Detokenizer(tokenizer, [1]).push([end]).text == "end"


def test_only_the_begin_of_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(byte_level(), [], stop=("END",))
    assert detokenizer.push([byte_id(b) for b in b"abcE"]).text == "abc"
    assert detokenizer.push([byte_id(b) for b in b"Nx"]).text == "ENx"
    assert detokenizer.push([byte_id(b) for b in b"E"]).text == ""
    assert detokenizer.finish() == "E"


def test_tokens_after_a_stop_string_do_not_count() -> None:
    detokenizer = Detokenizer(byte_level(), [], stop=("END", "zzz"))
    assert detokenizer.push([byte_id(b) for b in b"abEN"]) == ("ab", 4, None)
    assert detokenizer.push([byte_id(b) for b in b"Dmore"]) == ("", 1, "END")
    assert detokenizer.push([byte_id(b) for b in b"zzz"]) == ("", 0, "END")
    assert detokenizer.finish() == ""


def test_stop_string_complete_first_wins_and_then_the_longer() -> None:
    ids = [byte_id(b) for b in b"xabcd"]
    assert run(Detokenizer(byte_level(), [], stop=("abcd", "bc")), [ids])[0] == "xa"
    assert run(Detokenizer(byte_level(), [], stop=("c", "abc")), [ids])[0] == "x"


def test_ids_that_are_no_tokens_add_nothing() -> None:
    ids = [-1, 99999, *texts_as_ids("end"), 2**40, *texts_as_ids(" of")]
    assert run(Detokenizer(byte_level(), [-5, 2**33, 99999]), [ids])[0] == "end of"


def test_skipped_special_tokens_do_not_lengthen_the_window() -> None:
    calls: list[int] = []

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            calls.append(len(ids))
            return byte_level().decode(ids, skip_special_tokens)

    @dataclass
    class Wrapped:
        backend: Counting

    for before in ([], texts_as_ids("end"), [byte_id(0xE6)]):
        detokenizer = Detokenizer(Wrapped(Counting()), [])
        text, _ = run(detokenizer, [before, [1] * 300, texts_as_ids("of")])
        assert text == byte_level().decode(before) + "of"
    assert max(calls) < 100
