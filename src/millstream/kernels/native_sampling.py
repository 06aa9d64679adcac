"""From rows of logits to tokens, natively: argmax, log-sum-exp, and the draw, for many rows at once.

A row's result depends on that row alone. Rows must hold neither NaN nor plus infinity: repair them first.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream.kernels import _native


@dataclass(frozen=True)
class RowStats:
    """By row: the likeliest token (the lowest id among equals), its logit, and log(sum(exp(logits)))."""

    ids_R: Tensor
    best_R: Tensor
    log_sum_R: Tensor


def row_stats(runtime: _native.Runtime, logits_RV: Tensor) -> RowStats:
    """Statistics of each row of float32 logits. `logits[t] - log_sum` is token t's log-probability."""
    num_rows, vocab = _shape(logits_RV)
    found = RowStats(
        ids_R=torch.empty(num_rows, dtype=torch.int32),
        best_R=torch.empty(num_rows, dtype=torch.float32),
        log_sum_R=torch.empty(num_rows, dtype=torch.float64),
    )
    runtime.row_stats(
        num_rows,
        vocab,
        logits_RV.data_ptr(),
        found.ids_R.data_ptr(),
        found.best_R.data_ptr(),
        found.log_sum_R.data_ptr(),
    )
    return found


def draw(
    runtime: _native.Runtime,
    logits_RV: Tensor,
    *,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    number: Sequence[float],
) -> list[int]:
    """The token that each row's `number`, uniform in [0, 1), picks.

    Temperature (over 0), then min_p, top_k (0 or less: all) and top_p, each on what the one before has left; then the
    inverse of the cumulative distribution over the tokens kept, in the order of their ids. Among equal logits the lower
    id counts as the likelier. -1 for a row whose largest logit is not finite.
    """
    num_rows, vocab = _shape(logits_RV)
    temperature_R = torch.tensor(temperature, dtype=torch.float32)
    top_k_R = torch.tensor(top_k, dtype=torch.int32)
    top_p_R = torch.tensor(top_p, dtype=torch.float64)
    min_p_R = torch.tensor(min_p, dtype=torch.float32)
    number_R = torch.tensor(number, dtype=torch.float64)
    for column in (temperature_R, top_k_R, top_p_R, min_p_R, number_R):
        assert column.shape == (num_rows,), f"{column.shape[0]} parameters for {num_rows} rows"
    ids_R = torch.empty(num_rows, dtype=torch.int32)
    runtime.draw(
        num_rows,
        vocab,
        logits_RV.data_ptr(),
        temperature_R.data_ptr(),
        top_k_R.data_ptr(),
        top_p_R.data_ptr(),
        min_p_R.data_ptr(),
        number_R.data_ptr(),
        ids_R.data_ptr(),
    )
    found: list[int] = ids_R.tolist()
    return found


def _shape(logits_RV: Tensor) -> tuple[int, int]:
    assert logits_RV.dtype == torch.float32, f"logits are {logits_RV.dtype}: they must be float32"
    assert logits_RV.is_contiguous(), "logits are not contiguous"
    num_rows, vocab = logits_RV.shape
    return num_rows, vocab
