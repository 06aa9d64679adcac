"""The default model's tokenizer, built from its GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from tokenizers.decoders import DecodeStream

from millstream.errors import DownloadError, InvalidRequestError
from millstream.hub.files import ModelFiles, resolve
from millstream.tokenizer.tokenizer import _BYTE_OF_LETTER, Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "hello  world   and    more",
    " leading and trailing ",
    "tabs\tand\n\nnew\r\nlines \n \n",
    "don't I'll WE'RE they've",
    "3.14159 and 1,000,000 or 2024-12-31",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🙂",
    "漢字とかな、中文，한국어",
    "combining e\u0301 n\u0303 a\u0308\u0304 and precomposed é ñ",
    "עברית العربية ไทย हिन्दी",
    "def f(x: int) -> int:\n    return {'a': [x ** 2]}  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "half <|im_sta and <|im_end | > no specials",
    "\x00\x01\x7f\ufeff\u200b\ufffd",
    "٣٤٥ ½ Ⅷ ²",
    "a" * 300,
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    try:
        return resolve("smollm2")
    except DownloadError as e:
        pytest.skip(f"the default model is not here: {e}")


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return Tokenizer.load(files)


@pytest.fixture(scope="module")
def oracle(files: ModelFiles) -> Any:
    """transformers' own conversion of the same file.

    It ignores the file's pre-tokenizer (smollm: digits stand alone), so that one is put in: the one of the model's
    original tokenizer.json.
    """
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(files.path.parent, gguf_file=files.path.name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return oracle


def test_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_text(3575) == " capital"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("<|im_start|>user\n", [1, 4093, 198]),
    ],
)
def test_known_ids(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text, add_special_tokens=True) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


# The model has no token for these bytes: some control characters, and bytes that UTF-8 rarely or never uses.
MISSING_BYTES = {
    0x04,
    0x06,
    0x13,
    0x14,
    0x16,
    0x1D,
    0xC0,
    0xC1,
    0xF1,
    0xF2,
    0xF5,
    0xF6,
    0xF7,
    0xF8,
    0xF9,
    0xFA,
    0xFB,
    0xFC,
    0xFD,
    0xFE,
    0xFF,
}


def test_bytes_without_a_token(tokenizer: Tokenizer) -> None:
    letters = {byte: letter for letter, byte in _BYTE_OF_LETTER.items()}
    assert [b for b in range(256) if tokenizer.backend.token_to_id(letters[b]) is None] == sorted(MISSING_BYTES)
    assert tokenizer.encode("a\x06b", add_special_tokens=False) == tokenizer.encode("a", add_special_tokens=False) + (
        tokenizer.encode("b", add_special_tokens=False)
    )


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: not MISSING_BYTES & set(text.encode())))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_same_ids_as_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    for text in TEXTS + sources:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == oracle(text).input_ids
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_same_chat_as_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>'\"&"}]
    for messages in (chat, chat[1:], [*chat, {"role": "assistant", "content": "Yo"}]):
        for flag in (True, False):
            expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=flag)
            assert tokenizer.render_chat(messages, add_generation_prompt=flag) == expected


def test_same_continuation_as_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    messages = [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "It is"}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    expected = oracle.apply_chat_template(messages, tokenize=False, **options)
    assert tokenizer.render_chat(messages, **options) == expected
    assert expected.endswith("<|im_start|>assistant\nIt is")


def test_chat_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}])
    assert ids == [1, 9690, 198, 67, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]


def test_batch_is_as_single(tokenizer: Tokenizer) -> None:
    single = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert tokenizer.encode_batch(TEXTS, add_special_tokens=False) == single


def test_specials_are_skipped_unless_wanted(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([1, 19556, 2]) == "Hello"
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"


def test_token_of_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    assert tokenizer.token_text(ids[0]) == "\ufffd"
    stream = DecodeStream(skip_special_tokens=True)
    assert [p for i in ids if (p := stream.step(tokenizer.backend, i))] == ["🙂"]


def test_ids_without_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(49152) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([19556, 60000]) == "Hello"
    for bad in (-1, 2**40):
        with pytest.raises(InvalidRequestError, match=f"token id {bad} is outside the vocabulary of 49152"):
            tokenizer.decode([5, bad])


def test_text_that_is_not_unicode(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("a\ud800", add_special_tokens=False)


def test_template_file_replaces_the_models(files: ModelFiles, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    tokenizer = Tokenizer.load(files, chat_template=path)
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "<|im_start|>[user]Hi"
