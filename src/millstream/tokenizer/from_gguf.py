"""Builds a Vocabulary from a GGUF file's metadata: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from millstream.errors import ModelError
from millstream.hub.gguf import GGUFFile
from millstream.tokenizer.vocabulary import TokenForm, Vocabulary

MAX_TOKEN_LEN = 1024
"""Characters; longer SentencePiece pieces would make the search for their merges quadratic."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# Control tokens of these names end an answer even where the file names only one of them as its eos token: files
# made from a base model name the end of a document, and the chat template ends turns with another.
_END_TOKENS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>")
)

# The expressions by which text is cut before byte pairs are merged, as the models' own tokenizer.json files have them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _PreTokenizer:
    """One value of `tokenizer.ggml.pre`, and what goes with it."""

    steps: Callable[[], list[pre_tokenizers.PreTokenizer]]
    ignore_merges: bool = False
    """A piece that is a token as a whole is that token, even where merges would not make it."""
    add_bos: bool = False
    """Where the file does not say."""
    nfc: bool = False


def _gpt2_steps() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _digits_steps() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2_steps()]


def _split_steps(expression: str) -> Callable[[], list[pre_tokenizers.PreTokenizer]]:
    return lambda: [
        pre_tokenizers.Split(Regex(expression), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_GPT2 = _PreTokenizer(steps=_gpt2_steps)
_LLAMA_BPE = _PreTokenizer(steps=_split_steps(_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN = _PreTokenizer(steps=_split_steps(_QWEN2), nfc=True)
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _PreTokenizer(steps=_digits_steps),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": _PreTokenizer(steps=_split_steps(_TEKKEN), ignore_merges=True, add_bos=True),
}


def vocabulary_from_gguf(file: GGUFFile) -> Vocabulary:
    """The tokenizer that a GGUF file carries.

    Raises ModelError when it carries none, one of a kind that is not supported, or one that does not hold together.
    """
    return _Builder(file).build()


class _Builder:
    """The metadata under `tokenizer.`, checked as it is taken."""

    def __init__(self, file: GGUFFile) -> None:
        self._path = file.path
        self._metadata = file.metadata
        self._tokens: list[str] = self._list("tokens", str)
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        if not self._tokens or len(self._ids) != len(self._tokens):
            raise self._error(f"{len(self._tokens)} tokens, of which {len(self._ids)} are different")
        self._types: list[int] = self._list("token_type", int, length=len(self._tokens), default=_NORMAL)

    def build(self) -> Vocabulary:
        kind = self._get("model", str, "none")
        if kind == "gpt2":
            form: TokenForm = "byte_level"
            backend, add_bos = self._byte_level()
        elif kind == "llama":
            form = "sentencepiece"
            backend, add_bos = self._sentencepiece(), True
        else:
            raise ModelError(f"{self._path} has a tokenizer of the kind {kind!r}: supported are 'gpt2' and 'llama'")
        self._add_tokens(backend)
        bos, eos = self._token_id("bos"), self._token_id("eos")
        self._add_ends(
            backend,
            bos if self._get("add_bos_token", bool, add_bos) else None,
            eos if self._get("add_eos_token", bool, False) else None,
        )
        named = {"bos": bos, "eos": eos, "unk": self._token_id("unknown"), "pad": self._token_id("padding")}
        return Vocabulary(
            backend=backend,
            form=form,
            bos_token_id=bos,
            eos_token_ids=self._end_ids(eos),
            special_tokens={f"{name}_token": self._tokens[i] for name, i in named.items() if i is not None},
            chat_templates=self._chat_templates(),
        )

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        name = self._get("pre", str, "default")
        pre = _PRE_TOKENIZERS.get(name)
        if pre is None:
            raise ModelError(
                f"{self._path} needs the pre-tokenizer {name!r}: supported are {', '.join(sorted(_PRE_TOKENIZERS))}"
            )
        merges = [_pair(merge) for merge in self._list("merges", str)]
        try:
            model = models.BPE(vocab=self._ids, merges=merges, ignore_merges=pre.ignore_merges)
        except Exception as e:  # the library raises bare Exceptions
            raise self._error(str(e)) from e
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizers.Sequence(pre.steps())
        backend.decoder = decoders.ByteLevel()
        if pre.nfc:
            backend.normalizer = normalizers.NFC()
        return backend, pre.add_bos

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        unknown = self._token_id("unknown")
        try:
            model = models.BPE(
                vocab=self._ids,
                merges=self._merges_by_score(),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        except Exception as e:  # the library raises bare Exceptions
            raise self._error(str(e)) from e
        backend = tokenizers.Tokenizer(model)
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
        undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._get("add_space_prefix", bool, True):
            steps.insert(0, normalizers.Prepend("▁"))
            undo.append(decoders.Strip(content=" ", left=1, right=0))
        backend.normalizer = normalizers.Sequence(steps)
        backend.decoder = decoders.Sequence(undo)
        return backend

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """The merges that SentencePiece's scores stand for.

        SentencePiece merges the two neighbours whose union is the piece with the highest score. So each way to cut a
        piece into two pieces is a merge, and its rank is that of the piece's score.
        """
        scores: list[float] = self._list("scores", float, length=len(self._tokens))
        ids = {
            token: i
            for token, i in self._ids.items()
            if self._types[i] not in (_UNKNOWN, _CONTROL, _BYTE) and len(token) > 0
        }
        ranked: list[tuple[float, int, int, str, str]] = []
        for token, i in ids.items():
            if len(token) > MAX_TOKEN_LEN:
                raise self._error(f"token {i} has {len(token)} characters: at most {MAX_TOKEN_LEN} are supported")
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in ids and right in ids:
                    ranked.append((-scores[i], ids[left], ids[right], left, right))
        ranked.sort()
        return [(left, right) for *_, left, right in ranked]

    def _add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Tokens that are found in text before it is cut: control tokens, and those that the model's makers defined."""
        special = (_CONTROL, _UNKNOWN)
        found = [(token, kind) for token, kind in zip(self._tokens, self._types, strict=True) if token]
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in found if k in special])
        backend.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in found if k == _USER_DEFINED])

    def _add_ends(self, backend: tokenizers.Tokenizer, first: int | None, last: int | None) -> None:
        """Have `add_special_tokens=True` put token `first` before and token `last` behind a text."""
        ends = [i for i in (first, last) if i is not None]
        if not ends:
            return
        template = [*(self._tokens[i] for i in [first] if i is not None), "$A"]
        template += [self._tokens[i] for i in [last] if i is not None]
        try:
            backend.post_processor = processors.TemplateProcessing(
                single=template, special_tokens=[(self._tokens[i], i) for i in sorted(set(ends))]
            )
        except Exception as e:  # the library raises bare Exceptions
            raise self._error(str(e)) from e

    def _end_ids(self, eos: int | None) -> tuple[int, ...]:
        named = (eos, self._token_id("eot"), self._token_id("eom"))
        known = sorted(
            i for token in _END_TOKENS if (i := self._ids.get(token, -1)) >= 0 and self._types[i] == _CONTROL
        )
        return tuple(dict.fromkeys([i for i in named if i is not None] + known))

    def _chat_templates(self) -> dict[str, str]:
        key = "tokenizer.chat_template"
        found = {
            "default" if k == key else k[len(key) + 1 :]: v for k, v in self._metadata.items() if _is_under(k, key)
        }
        for name, source in found.items():
            if not isinstance(source, str):
                raise self._error(f"the chat template {name} is no text")
        return found

    def _token_id(self, name: str) -> int | None:
        key = f"{name}_token_id"
        value = self._get(key, int, -1)
        if value == -1:
            return None
        # Some files say "none" with the largest unsigned number.
        if value == 2**32 - 1:
            return None
        if not 0 <= value < len(self._tokens):
            raise self._error(f"{key} is {value}: there are {len(self._tokens)} tokens")
        return value

    def _get(self, key: str, kind: type[T], default: T) -> T:
        value: Any = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if type(value) is not kind:
            raise self._error(f"{key} is {value!r}: it must be of the type {kind.__name__}")
        return value

    def _list(self, key: str, kind: type[T], *, length: int | None = None, default: T | None = None) -> list[T]:
        values: Any = self._metadata.get(f"tokenizer.ggml.{key}")
        if values is None and default is not None and length is not None:
            return [default] * length
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise self._error(f"{key} is {'missing' if values is None else f'no list of {kind.__name__}'}")
        if length is not None and len(values) != length:
            raise self._error(f"{key} has {len(values)} entries for {length} tokens")
        return values

    def _error(self, message: str) -> ModelError:
        return ModelError(f"the tokenizer in {self._path} does not hold together: {message}")


def _pair(merge: str) -> tuple[str, str]:
    """The two sides of a merge. A side may begin with a space (some files have them), so the cut is not the first."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _is_under(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(prefix + ".")
