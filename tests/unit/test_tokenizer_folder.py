"""Tokenizers read from a folder with tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from millstream.errors import ConfigError, InvalidRequestError, ModelError
from millstream.hub.files import ModelFiles
from millstream.tokenizer.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hi"}]


def write(folder: Path, **files: Any) -> ModelFiles:
    """A folder with a small byte-level tokenizer.json, and JSON files named by the keyword (`.json` is added)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)} | {"hi": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "i")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<end>"])  # 257, 258, 259
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return ModelFiles("tiny", "safetensors", folder)


def test_tokens_and_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (260, 257, (258,))
    assert tokenizer.encode("hi", add_special_tokens=True) == [257, 256]
    # The file's own truncation to 4 and padding to 8 tokens are not applied.
    assert len(tokenizer.encode("x" * 20, add_special_tokens=False)) == 20
    text = "naïve 漢\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_text(257) == "<s>"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": 258}}, (258,)),
        ({"config": {"eos_token_id": 258}, "generation_config": {"eos_token_id": [259, 258]}}, (259, 258)),
        ({"tokenizer_config": {"eos_token": "<end>"}, "config": {"eos_token_id": 258}}, (259, 258)),
        ({"special_tokens_map": {"eos_token": "<end>"}, "config": {"eos_token_id": None}}, (259,)),
        ({"tokenizer_config": {"eos_token": "<none>"}}, ()),
    ],
)
def test_end_tokens(tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert Tokenizer.load(write(tmp_path, **files)).eos_token_ids == expected


def test_begin_token_from_the_models_config_only_without_a_tokenizer_config(tmp_path: Path) -> None:
    assert Tokenizer.load(write(tmp_path, config={"bos_token_id": 257})).bos_token_id == 257
    assert Tokenizer.load(write(tmp_path, tokenizer_config={"eos_token": "</s>"})).bos_token_id is None


def test_places_of_the_chat_template(tmp_path: Path) -> None:
    files = write(tmp_path, tokenizer_config={"chat_template": "config {{ bos_token }}", "bos_token": "<s>"})
    assert Tokenizer.load(files).render_chat(CHAT) == "config <s>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.load(files).render_chat(CHAT) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.load(files).render_chat(CHAT) == "jinja"
    own = tmp_path / "own.txt"
    own.write_text("own")
    assert Tokenizer.load(files, chat_template=own).render_chat(CHAT) == "own"
    with pytest.raises(ConfigError, match=r"--chat-template .*none\.txt can't be read"):
        Tokenizer.load(files, chat_template=tmp_path / "none.txt")
    own.write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"--chat-template .*own\.txt: .*not valid Jinja"):
        Tokenizer.load(files, chat_template=own)


def test_named_templates(tmp_path: Path) -> None:
    given = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools: {{ tools[0].function.name }}"},
        {"name": "rag", "template": "{% broken"},
    ]
    tokenizer = Tokenizer.load(write(tmp_path, tokenizer_config={"chat_template": given}))
    assert tokenizer.render_chat(CHAT) == "plain"
    tool = {"type": "function", "function": {"name": "add"}}
    assert tokenizer.render_chat(CHAT, tools=[tool]) == "tools: add"
    with pytest.raises(InvalidRequestError, match="does not read a variable 'documents_'"):
        tokenizer.render_chat(CHAT, template_kwargs={"documents_": 1})


def test_byte_fallback_tokenizer(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}, "▁": 257, "h": 258, "▁h": 259}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "h")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(ModelFiles("tiny", "safetensors", tmp_path))
    ids = tokenizer.encode("hé", add_special_tokens=True)
    assert ids == [259, 0xC3 + 1, 0xA9 + 1]
    assert [tokenizer.token_bytes(i) for i in ids] == [b" h", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "hé"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "can't be read as a tokenizer"),
        ("tokenizer_config.json", "[]", "must hold a JSON object, not a list"),
        ("config.json", "{'", "can't be read as JSON"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat template in .* is no text"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    files = write(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=words):
        Tokenizer.load(files)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(ModelFiles("tiny", "safetensors", tmp_path))
