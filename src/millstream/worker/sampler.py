"""The sampler: from the logits of a step to one token for each request.

A row's token depends on its logits, its parameters, its known tokens and (seed, position), and on nothing else: not on
the other rows, not on how many there are. Greedy rows without extras are settled by one argmax for all of them.

Shapes: R requests of the step, T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.kernels.native import NativeOps
from millstream.kernels.random import uniform
from millstream.messages import TokenLogprobs
from millstream.request import SamplingParams
from millstream.worker import sampling_math


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler needs to know of one request."""

    params: SamplingParams
    """With its seed set, unless it is greedy."""
    token_ids: Sequence[int] | NDArray[Any]
    """All known tokens: the prompt, then the output so far. Their number is the position of the random number."""
    num_prompt_tokens: int
    stop_token_ids: Sequence[int] = ()
    """Ids not to choose before min_tokens."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def is_plain(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether the next token is the likeliest one and nothing else is asked for."""
    return params.is_greedy and params.logprobs is None and not sampling_math.has_edits(params, num_output_tokens)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token, and its log-probabilities where they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Draw(Protocol):
    """Chooses among tokens, for many rows at once; a row's choice depends on that row alone."""

    def __call__(self, logits_RV: Tensor, rows: Sequence[SamplingRow], numbers: Sequence[float]) -> list[int]: ...


class Sampler:
    """Chooses tokens. Holds no state between calls. `draw` (default: numpy's) does it for rows that are not greedy."""

    def __init__(self, vocab_size: int, *, draw: Draw | None = None) -> None:
        self._vocab_size = vocab_size
        self._draw = draw or draw_in_numpy

    def sample(self, logits_RV: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """One token for each row. `logits_RV` is float32 and may be changed.

        Log-probabilities are those of the model: before the bias, the penalties and the temperature. NaN counts as a
        logit of minus infinity. A row in which everything is banned gets the token that was best before the bans.
        """
        assert logits_RV.shape == (len(rows), self._vocab_size), f"logits are {tuple(logits_RV.shape)}"
        if not rows:
            return []
        logits = _on_host(logits_RV)
        best_ids = logits.argmax(axis=1).tolist()
        # argmax stops at a NaN, so a finite maximum says that the row has neither NaN nor +inf
        is_sound = np.isfinite(logits[np.arange(len(rows)), best_ids])
        # absurd logits or penalties may overflow: the results are repaired, a warning helps nobody
        with np.errstate(all="ignore"):
            prepared = [
                _prepare(logits[r], row, best_id=best_ids[r], is_sound=bool(is_sound[r])) for r, row in enumerate(rows)
            ]
            chosen = [p.token_id for p in prepared]
            drawn = [r for r, p in enumerate(prepared) if p.token_id is None]
            if drawn:
                numbers = [uniform(_seed_of(rows[r]), len(rows[r].token_ids)) for r in drawn]
                picked_RV = torch.from_numpy(logits if len(drawn) == len(rows) else logits[drawn])
                for r, token_id in zip(drawn, self._draw(picked_RV, [rows[r] for r in drawn], numbers), strict=True):
                    chosen[r] = token_id
            return [_sampled(token_id, p.raw_V, row) for token_id, p, row in zip(chosen, prepared, rows, strict=True)]

    def prompt_logprobs(self, logits_TV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of `token_ids` (T of them), each under its row of logits, and of the likeliest tokens.

        `logits_TV` is float32 and may be changed.
        """
        assert logits_TV.shape == (len(token_ids), self._vocab_size), f"logits are {tuple(logits_TV.shape)}"
        logits = _on_host(logits_TV)
        found = []
        with np.errstate(all="ignore"):
            for logits_V, token_id in zip(logits, token_ids, strict=True):
                sampling_math.repair(logits_V)
                found.append(sampling_math.token_logprobs(logits_V, token_id, num_top=num_top))
        return found


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A row whose edits are done: its token, or None where it is to be drawn."""

    token_id: int | None
    raw_V: sampling_math.Floats
    """The model's own logits."""


def _prepare(logits_V: sampling_math.Floats, row: SamplingRow, *, best_id: int, is_sound: bool) -> _Prepared:
    params = row.params
    if not is_sound:
        sampling_math.repair(logits_V)
        best_id = int(logits_V.argmax())
    if not sampling_math.has_edits(params, row.num_output_tokens):
        is_settled = params.is_greedy or logits_V[best_id] == -np.inf
        return _Prepared(best_id if is_settled else None, logits_V)

    # log-probabilities are the model's, so from before the edits, for the token chosen after them
    raw_V = logits_V.copy() if params.logprobs is not None else logits_V
    sampling_math.edit_logits(
        logits_V,
        params=params,
        token_ids=row.token_ids,
        num_prompt_tokens=row.num_prompt_tokens,
        stop_token_ids=row.stop_token_ids,
    )
    token_id = int(logits_V.argmax())
    if not np.isfinite(logits_V[token_id]):
        sampling_math.repair(logits_V)
        token_id = int(logits_V.argmax())
        if logits_V[token_id] == -np.inf:
            return _Prepared(best_id, raw_V)
    return _Prepared(token_id if params.is_greedy else None, raw_V)


def _sampled(token_id: int | None, raw_V: sampling_math.Floats, row: SamplingRow) -> Sampled:
    assert token_id is not None, "a row was neither settled nor drawn"
    if row.params.logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, sampling_math.token_logprobs(raw_V, token_id, num_top=row.params.logprobs))


def _seed_of(row: SamplingRow) -> int:
    assert row.params.seed is not None, "a request that is not greedy reaches the sampler with its seed set"
    return row.params.seed


def draw_in_numpy(logits_RV: Tensor, rows: Sequence[SamplingRow], numbers: Sequence[float]) -> list[int]:
    """Row by row: the reference."""
    logits = _on_host(logits_RV)
    return [
        sampling_math.draw(logits[r], params=row.params, number=number)
        for r, (row, number) in enumerate(zip(rows, numbers, strict=True))
    ]


class NativeDraw:
    """All rows in one native call."""

    def __init__(self, ops: NativeOps) -> None:
        self._runtime = ops.runtime

    def __call__(self, logits_RV: Tensor, rows: Sequence[SamplingRow], numbers: Sequence[float]) -> list[int]:
        from millstream.kernels import native_sampling

        return native_sampling.draw(
            self._runtime,
            logits_RV,
            temperature=[row.params.temperature for row in rows],
            top_k=[row.params.top_k for row in rows],
            top_p=[row.params.top_p for row in rows],
            min_p=[row.params.min_p for row in rows],
            number=numbers,
        )


def _on_host(logits: Tensor) -> sampling_math.Floats:
    """The logits as a writable NumPy array: the tensor's own memory if it is on the CPU."""
    array: sampling_math.Floats = logits.detach().cpu().numpy()
    return array
