"""Tokenizers built from GGUF metadata: small made-up vocabularies of every supported kind."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import InvalidRequestError, ModelError
from millstream.hub.gguf import GGUFFile
from millstream.tokenizer.from_gguf import vocabulary_from_gguf
from millstream.tokenizer.tokenizer import _BYTE_OF_LETTER, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def load(**metadata: Any) -> Tokenizer:
    """The tokenizer of a file with `tokenizer.ggml.` metadata."""
    full = {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if key != "chat_template"}
    if "chat_template" in metadata:
        full["tokenizer.chat_template"] = metadata["chat_template"]
    return Tokenizer(vocabulary_from_gguf(GGUFFile(Path("x.gguf"), full, {})))


def byte_level(**more: Any) -> dict[str, Any]:
    """256 bytes, the merges h+e, l+l, he+ll, hell+o and Ġ+hello, a token `the` that no merge makes, specials."""
    letters = sorted(_BYTE_OF_LETTER, key=_BYTE_OF_LETTER.__getitem__)
    tokens = [*letters, "he", "ll", "hell", "hello", "Ġhello", "the", "<s>", "</s>", "<think>"]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [NORMAL] * 262 + [CONTROL, CONTROL, USER_DEFINED],
        "merges": ["h e", "l l", "he ll", "hell o", "Ġ hello"],
        "bos_token_id": 262,
        "eos_token_id": 263,
        **more,
    }


def pieces(pre: str, text: str) -> list[str]:
    backend = load(**byte_level(pre=pre)).backend
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


TEXT = "It's 12345 X\n\n  y DON'T hello!!\n"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", " X", "\n\n ", " y", " DON", "'", "T", " hello", "!!", "\n"]),
        ("default", ["It", "'s", " 12345", " X", "\n\n ", " y", " DON", "'", "T", " hello", "!!", "\n"]),
        (
            "smollm",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " X", "\n\n ", " y", " DON", "'", "T", " hello", "!!", "\n"],
        ),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " X", "\n\n", " ", " y", " DON", "'T", " hello", "!!\n"]),
        (
            "qwen2",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " X", "\n\n", " ", " y", " DON", "'T", " hello", "!!\n"],
        ),
        (
            "tekken",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " X", "\n\n", " ", " y", " DON", "'T", " hello", "!!\n"],
        ),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(pre: str, expected: list[str]) -> None:
    assert pieces(pre, TEXT) == expected


def test_tekken_cuts_at_case() -> None:
    assert pieces("tekken", "camelCase HTTPServer a/b//\n") == [
        "camel", "Case", " HTTPServer", " a", "/b", "//\n",
    ]  # fmt: skip


def test_qwen_composes_characters() -> None:
    assert load(**byte_level(pre="qwen2")).encode("e\u0301", add_special_tokens=False) == [0xC3, 0xA9]
    assert load(**byte_level(pre="llama-bpe")).encode("e\u0301", add_special_tokens=False) == [0x65, 0xCC, 0x81]


def test_whole_pieces_skip_merges_where_the_family_does() -> None:
    assert load(**byte_level(pre="llama-bpe", add_bos_token=False)).encode("the", add_special_tokens=True) == [261]
    assert load(**byte_level(pre="qwen2")).encode("the", add_special_tokens=True) == [ord("t"), 256]


def test_merges_special_and_user_tokens() -> None:
    tokenizer = load(**byte_level())
    ids = tokenizer.encode("hello hello<think></s>", add_special_tokens=False)
    assert ids == [259, 260, 264, 263]
    assert tokenizer.decode(ids) == "hello hello<think>"
    assert tokenizer.special_ids == {262, 263}
    assert tokenizer.token_bytes(260) == b" hello"


@pytest.mark.parametrize(
    ("pre", "more", "expected"),
    [
        ("gpt-2", {}, [259]),
        ("gpt-2", {"add_bos_token": True}, [262, 259]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [262, 259, 263]),
        ("gpt-2", {"add_eos_token": True}, [259, 263]),
        ("llama-bpe", {}, [262, 259]),
        ("llama-bpe", {"add_bos_token": False}, [259]),
    ],
)
def test_begin_and_end_tokens(pre: str, more: dict[str, Any], expected: list[int]) -> None:
    tokenizer = load(**byte_level(pre=pre, **more))
    assert tokenizer.encode("hello", add_special_tokens=True) == expected
    assert tokenizer.encode("hello", add_special_tokens=False) == [259]


def test_chat_does_not_double_the_begin_token() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = load(**byte_level(add_bos_token=True, chat_template=template))
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [262, 259, 263]


def test_end_tokens_are_found_by_name() -> None:
    metadata = byte_level(eos_token_id=262, eot_token_id=261)
    assert load(**metadata).eos_token_ids == (262, 261, 263)  # `</s>` is 263
    metadata["token_type"] = [NORMAL] * 264 + [USER_DEFINED]
    assert load(**metadata).eos_token_ids == (262, 261)  # a name that text can hold ends nothing


def test_no_template() -> None:
    tokenizer = load(**byte_level())
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match=r"no chat template.*--chat-template") as error:
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert error.value.param == "messages"


# -- SentencePiece ----------------------------------------------------------------------------------------------

PIECES = {"▁": -9.0, "h": -9.5, "e": -9.5, "l": -9.5, "o": -9.5, "lo": -1.0, "el": -3.0, "hel": -2.0, "he": -4.0,
          "hello": -5.0, "▁hello": -5.5, "▁▁": -6.0, "▁h": -6.5, "ll": -2.5}  # fmt: skip


def sentencepiece(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)],
        "scores": [0.0] * 259 + list(PIECES.values()),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def reference(text: str) -> list[bytes]:
    """SentencePiece's own rule, slowly: join the two neighbours with the best score, the first such, while any."""
    parts = list(text.replace(" ", "▁"))
    while True:
        scored = [(PIECES[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in PIECES]
        if not scored:
            break
        at = -max(scored)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out = []
    for part in parts:
        data = part.replace("▁", " ").encode()
        out += [data] if part in PIECES else [bytes([byte]) for byte in data]
    return out


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="helo é漢", max_size=12))
def test_sentencepiece_joins_by_score(text: str) -> None:
    tokenizer = load(**sentencepiece(add_space_prefix=False))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == reference(text)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_prefix_begin_and_bytes() -> None:
    tokenizer = load(**sentencepiece())
    ids = tokenizer.encode("hel é", add_special_tokens=True)
    assert [tokenizer.token_text(i) for i in ids[:3]] == ["<s>", " ", "hel"]
    assert [tokenizer.token_bytes(i) for i in ids[3:]] == [b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "hel é"
    without = load(**sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert without.encode("hel", add_special_tokens=True) == ids[2:3]
    assert without.decode(ids[2:3]) == "hel"


def test_sentencepiece_special_tokens_in_text() -> None:
    tokenizer = load(**sentencepiece())
    ids = tokenizer.encode("<s>hel</s>", add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == ["<s>", " ", "hel", "</s>"]
    # Text never becomes a byte token by its name, nor <unk> by being unknown.
    assert (
        b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode("<0x41>", add_special_tokens=False)) == b" <0x41>"
    )


# -- what does not hold together --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "tokens is missing"),
        (byte_level(model="bert"), "kind 'bert': supported are 'gpt2' and 'llama'"),
        (byte_level(pre="deepseek-coder"), "pre-tokenizer 'deepseek-coder': supported are .*smollm"),
        (byte_level(tokens=[]), "0 tokens"),
        (byte_level(tokens=["a", "a"]), "2 tokens, of which 1 are different"),
        (byte_level(tokens=[1, 2]), "tokens is no list of str"),
        (byte_level(tokens="abc"), "tokens is no list of str"),
        (byte_level(merges=None), "merges is missing"),
        (byte_level(merges=["h zz"]), "out of vocabulary"),
        (byte_level(merges=["nospace"]), "out of vocabulary"),
        (byte_level(token_type=[1]), "token_type has 1 entries for 265 tokens"),
        (byte_level(bos_token_id=999), "bos_token_id is 999: there are 265 tokens"),
        (byte_level(eos_token_id="x"), "eos_token_id is 'x'"),
        (byte_level(add_bos_token=1), "add_bos_token is 1: it must be of the type bool"),
        (byte_level(chat_template=5), "the chat template default is no text"),
        (byte_level(chat_template="{% if %}"), "not valid Jinja"),
        (sentencepiece(scores=None), "scores is missing"),
        (sentencepiece(scores=[0.0]), "scores has 1 entries"),
    ],
)
def test_bad_vocabulary_is_refused(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load(**metadata)
