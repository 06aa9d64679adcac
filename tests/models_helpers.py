"""Helpers for tests of models: the default model's file, and a driver that runs a Decoder without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from millstream.hub.files import ModelFiles, resolve
from millstream.kernels.ops import Ops, StepTables, make_ops
from millstream.layers.context import ForwardContext
from millstream.models.arch import ModelArch
from millstream.models.decoder import Decoder
from millstream.models.load import load_decoder


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The GGUF file of the default model, fetched if need be."""
    return resolve("smollm2").path


def step_tables(requests: Sequence[tuple[int, int, Sequence[int]]], *, block_size: int, padding: int = 0) -> StepTables:
    """Tables of a step of (context_len, query_len, block ids) for each request; `padding` adds unused columns."""
    width = max(len(blocks) for _, _, blocks in requests) + padding
    positions, slots, starts = [], [], [0]
    for context_len, query_len, blocks in requests:
        at = range(context_len - query_len, context_len)
        positions += at
        slots += [blocks[p // block_size] * block_size + p % block_size for p in at]
        starts.append(starts[-1] + query_len)
    return StepTables(
        positions_T=torch.tensor(positions, dtype=torch.int32),
        slot_mapping_T=torch.tensor(slots, dtype=torch.int32),
        query_start_R1=torch.tensor(starts, dtype=torch.int32),
        context_len_R=torch.tensor([c for c, _, _ in requests], dtype=torch.int32),
        block_table_RB=torch.tensor([[*b, *[0] * (width - len(b))] for _, _, b in requests], dtype=torch.int32),
        query_lens=tuple(q for _, q, _ in requests),
        context_lens=tuple(c for c, _, _ in requests),
    )


@dataclass
class Row:
    """One request of a Driver: its tokens, how many of them are computed, and its blocks."""

    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)
    """The logits of every token computed."""


class Driver:
    """Runs a Decoder step by step with greedy choice. Blocks are handed out in a scattered order."""

    def __init__(self, decoder: Decoder, *, num_blocks: int = 256, block_size: int = 8) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.caches = decoder.allocate_kv_caches(num_blocks, block_size)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
        self._free: list[int] = order.tolist()

    def add(self, token_ids: Sequence[int]) -> Row:
        return Row(list(token_ids), [])

    def step(self, batch: Sequence[tuple[Row, int]], *, keeps_logits: bool = False) -> None:
        """Compute the next so many known tokens of each; one that has none left gets its next token."""
        rows, tokens = [], []
        for sequence, count in batch:
            end = sequence.num_computed + count
            tokens += sequence.token_ids[sequence.num_computed : end]
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self._free.pop())
            rows.append((end, count, sequence.blocks))
        tables = step_tables(rows, block_size=self.block_size, padding=1)
        hidden = self.decoder.forward(torch.tensor(tokens, dtype=torch.int32), ForwardContext(tables, self.caches))
        last = tables.query_start_R1[1:] - 1
        wanted = hidden if keeps_logits else hidden.index_select(0, last)
        logits = self.decoder.logits(wanted)
        ends = last.tolist() if keeps_logits else list(range(len(batch)))
        for (sequence, count), end in zip(batch, ends, strict=True):
            if keeps_logits:
                sequence.logits.append(logits[end - count + 1 : end + 1])
            sequence.num_computed += count
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(int(logits[end].argmax()))

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = 10**9) -> list[list[int]]:
        """`num_tokens` greedy tokens for every prompt, all together, prompts in chunks of at most `chunk`."""
        sequences = [self.add(prompt) for prompt in prompts]
        ends = [len(prompt) + num_tokens for prompt in prompts]
        while live := [s for s, end in zip(sequences, ends, strict=True) if len(s.token_ids) < end]:
            self.step([(s, min(chunk, len(s.token_ids) - s.num_computed)) for s in live])
        for sequence in sequences:
            self._free += sequence.blocks
        return [s.token_ids[len(p) :] for s, p in zip(sequences, prompts, strict=True)]

    def logits(self, prompt: Sequence[int], *, chunk: int = 10**9) -> Tensor:
        """The logits of all tokens of a prompt: (T, V)."""
        sequence = self.add(prompt)
        while sequence.num_computed < len(prompt):
            self.step([(sequence, min(chunk, len(prompt) - sequence.num_computed))], keeps_logits=True)
        self._free += sequence.blocks
        return torch.cat(sequence.logits)


def load(path: Path, *, dtype: str = "float32", ops: Ops | None = None) -> Decoder:
    """The Decoder of a folder or a GGUF file."""
    files = ModelFiles(name="test", kind="gguf" if path.suffix == ".gguf" else "safetensors", path=path)
    arch = ModelArch.from_files(files)
    return load_decoder(files, arch, ops or make_ops("reference", dtype=dtype), dtype=dtype)
