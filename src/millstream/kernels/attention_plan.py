"""How the reference operations cut a step's attention into calls of torch: made once a step, used by every layer.

Requests with one token (decodes) of like context length go together, padded to the longest; every other request goes
alone, long ones in pieces of query rows. A cache of shape (blocks, 2, S, G, E) is read as rows of S * G * E, so keys of
block b are row 2b and its values row 2b + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millstream.kernels.ops import StepTables

MAX_GROUP_TOKENS = 8192
"""Padded context of a group of decodes: bounds the buffer its keys and values are gathered in."""
CALL_TOKENS = 512
"""Context tokens that take as long as one more call."""
MAX_PIECE_ROWS = 1024
"""Query rows of one call: bounds its mask."""


@dataclass(frozen=True)
class DecodeGroup:
    """R requests with one token each. All contexts are padded to L, a multiple of the block size."""

    rows_R: Tensor | None
    """Their rows of q; None: all rows, in order."""
    cache_rows: Tensor
    """(2 * R * L / S,): rows of the cache with the keys of all, then with the values."""
    num_requests: int
    context_len: int
    """L, or the exact length where the group is one request."""
    mask: Tensor | None
    """(R, 1, 1, L) to add to the scores."""


@dataclass(frozen=True)
class Piece:
    """Rows of q from `start` to `end`, of one request, over its context up to the last of them."""

    start: int
    end: int
    cache_rows: Tensor
    context_len: int
    mask: Tensor | None
    """(T, L) to add to the scores; None: plainly causal, or one row that sees all."""
    is_causal: bool


@dataclass(frozen=True)
class AttentionPlan:
    groups: list[DecodeGroup]
    pieces: list[Piece]


def plan_attention(tables: StepTables, *, block_size: int, window: int | None, dtype: torch.dtype) -> AttentionPlan:
    """Plan the attention of one step for layers with this window."""
    planner = _Planner(tables, block_size, window, dtype)
    singles = [r for r, query_len in enumerate(tables.query_lens) if query_len == 1]
    groups = [planner.group(requests) for requests in _group(planner, singles)]
    pieces, start = [], 0
    for r, query_len in enumerate(tables.query_lens):
        if query_len > 1:
            for first in range(0, query_len, MAX_PIECE_ROWS):
                pieces.append(planner.piece(r, start, first, min(first + MAX_PIECE_ROWS, query_len)))
        start += query_len
    return AttentionPlan(groups, pieces)


def _group(planner: _Planner, requests: list[int]) -> list[list[int]]:
    """Cut decodes into groups: a new one begins where padding the rest would cost more than a call."""
    groups: list[list[int]] = []
    longest = 0
    requests = sorted(requests, key=lambda r: -planner.num_blocks(r))
    for i, r in enumerate(requests):
        num_blocks, size = planner.num_blocks(r), planner.block_size
        saved = (longest - num_blocks) * (len(requests) - i) * size
        if not groups or saved > CALL_TOKENS or (len(groups[-1]) + 1) * longest * size > MAX_GROUP_TOKENS:
            groups.append([])
            longest = num_blocks
        groups[-1].append(r)
    return [sorted(group) for group in groups]


class _Planner:
    def __init__(self, tables: StepTables, block_size: int, window: int | None, dtype: torch.dtype) -> None:
        self.block_size = block_size
        self._tables = tables
        self._window = window
        self._dtype = dtype
        self._device = tables.block_table_RB.device
        # finite, so that a stretch of the context that is masked as a whole makes no NaN
        self._masked = torch.finfo(dtype).min / 4

    def _first_block(self, position: int) -> int:
        """The first block that the token at `position` sees."""
        return 0 if self._window is None else max(0, position - self._window + 1) // self.block_size

    def num_blocks(self, r: int) -> int:
        """Blocks that the last token of request r sees."""
        context_len = self._tables.context_lens[r]
        return -(-context_len // self.block_size) - self._first_block(context_len - 1)

    def group(self, requests: list[int]) -> DecodeGroup:
        tables, size = self._tables, self.block_size
        longest = max(self.num_blocks(r) for r in requests)
        context_lens = [tables.context_lens[r] for r in requests]
        firsts = [self._first_block(n - 1) for n in context_lens]
        is_all = len(requests) == len(tables.query_lens)
        index_R = None if is_all else torch.tensor(requests, device=self._device)
        rows_R = None if index_R is None else tables.query_start_R1.index_select(0, index_R).long()
        if len(requests) == 1:
            (r,), (first,), (context_len,) = requests, firsts, context_lens
            blocks = tables.block_table_RB[r, first : first + longest].long() * 2
            lower = 0 if self._window is None else max(0, context_len - self._window)
            mask = self._mask(range(context_len - 1, context_len), lower=first * size, upper=context_len)
            return DecodeGroup(
                rows_R,
                torch.cat((blocks, blocks + 1)),
                1,
                context_len - first * size,
                None if lower <= first * size else mask.view(1, 1, 1, -1),
            )
        first_R1 = torch.tensor(firsts, device=self._device).unsqueeze(1)
        columns_RB = first_R1 + torch.arange(longest, device=self._device)
        columns_RB = columns_RB.clamp_max(tables.block_table_RB.shape[1] - 1)
        table_RB = tables.block_table_RB if index_R is None else tables.block_table_RB.index_select(0, index_R)
        blocks = table_RB.long().gather(1, columns_RB).flatten() * 2
        positions_RL = first_R1 * size + torch.arange(longest * size, device=self._device)
        context_len_R1 = torch.tensor(context_lens, device=self._device).unsqueeze(1)
        unseen_RL = positions_RL >= context_len_R1
        if self._window is not None:
            unseen_RL |= positions_RL < context_len_R1 - self._window
        mask_RL = torch.zeros(unseen_RL.shape, dtype=self._dtype, device=self._device)
        mask_RL.masked_fill_(unseen_RL, self._masked)
        return DecodeGroup(
            rows_R,
            torch.cat((blocks, blocks + 1)),
            len(requests),
            longest * size,
            mask_RL.view(len(requests), 1, 1, -1),
        )

    def piece(self, r: int, row: int, first: int, last: int) -> Piece:
        """Tokens `first` to `last` - 1 of those that request r has in this step, whose rows of q begin at `row`."""
        size, tables = self.block_size, self._tables
        before = tables.context_lens[r] - tables.query_lens[r]
        begin, end = before + first, before + last
        first_block = self._first_block(begin)
        blocks = tables.block_table_RB[r, first_block : -(-end // size)].long() * 2
        lower = first_block * size
        is_causal = begin == lower and (self._window is None or last - first <= self._window)
        return Piece(
            start=row + first,
            end=row + last,
            cache_rows=torch.cat((blocks, blocks + 1)),
            context_len=end - lower,
            mask=None if is_causal else self._mask(range(begin, end), lower=lower, upper=end),
            is_causal=is_causal,
        )

    def _mask(self, positions: range, *, lower: int, upper: int) -> Tensor:
        """(T, L): which of the positions `lower` to `upper` each of `positions` sees."""
        query_T1 = torch.arange(positions.start, positions.stop, device=self._device).unsqueeze(1)
        key_L = torch.arange(lower, upper, device=self._device)
        unseen_TL = key_L > query_T1
        if self._window is not None:
            unseen_TL |= key_L <= query_T1 - self._window
        mask_TL = torch.zeros(unseen_TL.shape, dtype=self._dtype, device=self._device)
        return mask_TL.masked_fill_(unseen_TL, self._masked)
