"""Reads a Vocabulary from a folder: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from millstream.errors import ModelError
from millstream.hub.local import MAX_JSON_BYTES, read_json
from millstream.tokenizer.vocabulary import TokenForm, Vocabulary

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def vocabulary_from_folder(folder: Path) -> Vocabulary:
    """The tokenizer in `folder`: tokenizer.json, with tokenizer_config.json, special_tokens_map.json,
    generation_config.json, config.json and the chat template's files where they are there.

    Raises ModelError when there is no tokenizer.json or a file does not hold what it should.
    """
    backend = _backend(folder / "tokenizer.json")
    config = _optional(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config, _optional(folder / "special_tokens_map.json"))
    model_config = _optional(folder / "config.json")
    generation_config = _optional(folder / "generation_config.json")

    def token_id(name: str) -> int | None:
        token = special_tokens.get(name)
        return None if token is None else backend.token_to_id(token)

    bos = token_id("bos_token")
    if not config and bos is None:
        bos = next(iter(_ids(model_config, "bos_token_id")), None)
    eos = token_id("eos_token")
    ends = [] if eos is None else [eos]
    # A model's list of end tokens in generation_config.json is newer than the one in config.json.
    ends += _ids(generation_config, "eos_token_id") or _ids(model_config, "eos_token_id")
    return Vocabulary(
        backend=backend,
        form=_form(backend),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        special_tokens=special_tokens,
        chat_templates=_chat_templates(folder, config),
    )


def _backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(
            f"{path.parent} has no tokenizer.json: other forms (tokenizer.model, vocab.json with merges.txt) are not "
            "read; saving the tokenizer with the transformers library writes one"
        )
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelError(f"{path} has {path.stat().st_size} bytes: at most {MAX_JSON_BYTES} are read")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exceptions
        raise ModelError(f"{path} can't be read as a tokenizer: {e}") from e
    # Lengths are the engine's business: a prompt that was silently cut or padded would be another prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _form(backend: tokenizers.Tokenizer) -> TokenForm:
    """How the tokens stand for bytes, told by the decoder."""
    if backend.decoder is None:
        return "text"
    kinds = {step["type"] for step in _steps(json.loads(backend.decoder.__getstate__()))}
    if "ByteLevel" in kinds:
        return "byte_level"
    return "sentencepiece" if kinds & {"ByteFallback", "Metaspace"} else "text"


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for inner in decoder["decoders"] for step in _steps(inner)] if "decoders" in decoder else [decoder]


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name, special_map.get(name))
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _ids(config: dict[str, Any], key: str) -> list[int]:
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and i >= 0]


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Jinja sources by name. A file of its own comes before the key in tokenizer_config.json."""
    try:
        found = {
            path.stem: path.read_text(encoding="utf-8") for path in folder.glob("additional_chat_templates/*.jinja")
        }
        if (folder / "chat_template.jinja").is_file():
            return found | {"default": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError(f"the chat template in {folder} can't be read: {e}") from e
    given = _optional(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(given, list):
        given = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
    elif given is not None:
        given = {"default": given}
    for name, source in (given or {}).items():
        if not isinstance(name, str) or not isinstance(source, str):
            raise ModelError(f"the chat template in {folder} is no text")
        found[name] = source
    return found
