"""The load of a simulation: the lengths and times that `bench serve` would send with the same flags, or a recorded one.

Random prompts have the very lengths that `bench serve` draws. Their token ids are made when they arrive, so that a
load of any size takes little memory; what two prompts have in common (a prefix, a repeated line) they share here too.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

from millstream.bench.arrivals import arrival_times
from millstream.bench.datasets import BenchPrompt, RandomShape, chat_prompts, sharegpt_prompts
from millstream.bench.options import BenchOptions
from millstream.bench.tokens import LocalTokenizer
from millstream.errors import ConfigError

_TEXT_SEED = 0x7E87


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load: when it is sent (seconds after the start), its prompt, the length of its answer."""

    at: float
    prompt_token_ids: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class _Planned:
    """A prompt before its token ids are made: `seed` and the number of tokens decide them."""

    prompt_len: int
    output_len: int
    seed: tuple[int, int]
    token_ids: list[int] | None = None


class RecordedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a recorded load."""

    at: float
    """Seconds after the first request's."""
    input_len: int
    output_len: int


def recorded_names() -> list[str]:
    """The recorded loads that come with millstream."""
    folder = resources.files("millstream.sim") / "data" / "loads"
    return sorted(f.name.removesuffix(".jsonl") for f in folder.iterdir() if f.name.endswith(".jsonl"))


def read_recorded(name: str) -> list[RecordedRequest]:
    """The requests of a recorded load, by their time: one of `recorded_names`, or a .jsonl file of one's own.

    Raises ConfigError where it can't be read, naming the line.
    """
    if name in recorded_names():
        text = (resources.files("millstream.sim") / "data" / "loads" / f"{name}.jsonl").read_bytes()
    else:
        try:
            text = Path(name).read_bytes()
        except OSError as e:
            known = ", ".join(recorded_names())
            raise ConfigError(f"--replay {name} can't be read: {e.strerror or e} (built in: {known})") from e
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            request = msgspec.json.decode(line, type=RecordedRequest)
        except msgspec.MsgspecError as e:
            raise ConfigError(f"--replay {name}, line {number}: {e}") from e
        if request.at < 0 or request.input_len < 1 or request.output_len < 1:
            raise ConfigError(f"--replay {name}, line {number}: at must be 0 or more, both lengths 1 or more")
        found.append(request)
    if not found:
        raise ConfigError(f"--replay {name} holds no request")
    return sorted(found, key=lambda r: r.at)


class Load:
    """Requests in the order of their arrival."""

    def __init__(self, options: BenchOptions, *, vocab_size: int, replay: str | None = None) -> None:
        """Plan it. Raises ConfigError where a dataset's file, or that of the recorded load, can't be read."""
        self._options = options
        self._vocab_size = vocab_size
        self._recorded = read_recorded(replay) if replay is not None else None
        if self._recorded is not None:
            self._planned = [
                _Planned(r.input_len, r.output_len, (options.seed, 1 + i)) for i, r in enumerate(self._recorded)
            ]
        elif options.dataset_name == "random":
            self._planned = _plan_random(options)
        else:
            self._planned = asyncio.run(_plan_texts(options))
        self._prefix = self._draw((options.seed, 0), options.random_prefix_len)

    def __len__(self) -> int:
        return len(self._planned)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(p.prompt_len + p.output_len for p in self._planned)

    def arrivals(self) -> Iterator[Arrival]:
        """The requests, their token ids made one by one."""
        options = self._options
        if self._recorded is not None:
            times = [r.at for r in self._recorded]
        else:
            times = arrival_times(
                len(self), rate=options.request_rate, burstiness=options.burstiness, seed=options.seed
            )
        shared = self._prefix if options.dataset_name == "random" else []
        for at, planned in zip(times, self._planned, strict=True):
            ids = planned.token_ids
            if ids is None:
                ids = shared + self._draw(planned.seed, planned.prompt_len - len(shared))
            yield Arrival(at, ids, planned.output_len)

    def _draw(self, seed: Sequence[int], count: int) -> list[int]:
        ids: list[int] = np.random.default_rng(seed).integers(0, self._vocab_size, size=count).tolist()
        return ids


def _plan_random(options: BenchOptions) -> list[_Planned]:
    shape = RandomShape(
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
    )
    # the generator and the order of draws of bench.datasets.random_prompts
    input_lens, output_lens = shape.draw(options.num_prompts, np.random.default_rng(options.seed))
    return [
        _Planned(shape.prefix_len + prompt_len, output_len, (options.seed, 1 + i))
        for i, (prompt_len, output_len) in enumerate(zip(input_lens, output_lens, strict=True))
    ]


async def _plan_texts(options: BenchOptions) -> list[_Planned]:
    counter = LocalTokenizer(options.tokenizer) if options.tokenizer is not None else None
    path, n = options.dataset_path, options.num_prompts
    assert path is not None, "BenchOptions refuses a dataset of a file without its path"
    prompts: list[BenchPrompt]
    if options.dataset_name == "sharegpt":
        output_len = options.sharegpt_output_len
        prompts = await sharegpt_prompts(path, n=n, seed=options.seed, output_len=output_len, counter=counter)
    else:
        prompts = await chat_prompts(path, n=n, output_len=options.output_len, counter=counter)
    texts = [p.prompt for p in prompts if isinstance(p.prompt, str)]
    ids: Sequence[list[int] | None] = await counter.encode(texts) if counter is not None else [None] * n
    return [
        # equal texts get equal ids
        _Planned(p.prompt_len, p.output_len, (_TEXT_SEED, zlib.crc32(text.encode())), token_ids)
        for p, text, token_ids in zip(prompts, texts, ids, strict=True)
    ]
