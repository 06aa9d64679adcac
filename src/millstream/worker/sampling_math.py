"""What is done to one row of logits: penalties, the choice of candidates, the draw, log-probabilities.

Everything here takes one request's logits as a NumPy vector and runs in one thread, in a fixed order. That is why a
row's result cannot depend on the rows beside it. No function sorts the vocabulary: a bound found in one cheap pass
leaves a few hundred candidates, and the result is exactly that of a full sort.

Shapes: V vocabulary, C candidates, B blocks. Among equal logits the lower token id always counts as the likelier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.messages import TokenLogprobs
from millstream.request import SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't carry."""

LOWEST_TEMPERATURE = 1e-6
"""Below it a temperature would underflow in float32; at it, any visible difference of logits already decides."""

_MAX_BLOCK_LEN = 64
_SUM_LEN = 256
_NUM_BINS = 1024
_NARROWEST_RANGE = 1e-30
_SMALLEST_WEIGHT = float(np.finfo(np.float32).smallest_subnormal)


def repair(logits_V: Floats) -> None:
    """Make every logit a number, in place: NaN counts as minus infinity, plus infinity as the largest number."""
    np.nan_to_num(logits_V, copy=False, nan=-np.inf, posinf=float(np.finfo(np.float32).max), neginf=-np.inf)


def has_edits(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether `edit_logits` would do anything for this row."""
    return bool(params.logit_bias) or params.has_penalties or num_output_tokens < params.min_tokens


def edit_logits(
    logits_V: Floats,
    *,
    params: SamplingParams,
    token_ids: Sequence[int] | NDArray[Any],
    num_prompt_tokens: int,
    stop_token_ids: Sequence[int],
) -> None:
    """Apply the logit bias, the ban on stop tokens before min_tokens, and the penalties, in place.

    The three penalties look at the last `repeat_last_n` of `token_ids` (prompt and output): the repetition penalty at
    all of these, the presence and frequency penalties at those of the output. Ids outside the vocabulary are skipped.
    """
    vocab_size = len(logits_V)
    for token_id, bias in (params.logit_bias or {}).items():
        if 0 <= token_id < vocab_size:
            logits_V[token_id] += bias
    if len(token_ids) - num_prompt_tokens < params.min_tokens:
        logits_V[_within(stop_token_ids, vocab_size)] = -np.inf
    if not params.has_penalties:
        return
    begin = 0 if params.repeat_last_n < 0 else max(0, len(token_ids) - params.repeat_last_n)
    if params.repetition_penalty != 1:
        # a token that occurs twice is written twice, with the same value
        seen = _within(token_ids[begin:], vocab_size)
        values = logits_V[seen]
        penalty = np.float32(params.repetition_penalty)
        logits_V[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        said = _within(token_ids[max(begin, num_prompt_tokens) :], vocab_size)
        said, counts = np.unique(said, return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        logits_V[said] -= penalties.astype(np.float32)


def draw(logits_V: Floats, *, params: SamplingParams, number: float) -> int:
    """The token that `number`, uniform in [0, 1), picks from the distribution that `params` makes of the logits.

    Temperature, then min_p, top_k and top_p, each on what the one before has left; then the inverse of the cumulative
    distribution over the tokens kept, in the order of their ids. At least one logit must be finite, none NaN or +inf.
    """
    vocab_size = len(logits_V)
    best = logits_V.max()
    temperature = np.float32(max(params.temperature, LOWEST_TEMPERATURE))
    has_top_k = 0 < params.top_k < vocab_size
    if not has_top_k and params.min_p == 0:
        weights_V = np.exp((logits_V - best) / temperature)
        if params.top_p == 1:
            return _pick(weights_V, number)
        kept = _likeliest_by_mass(logits_V, weights_V, params.top_p)
        return int(kept[_pick(weights_V[kept], number)])

    lowest = _kth_bound(logits_V, params.top_k) if has_top_k else np.float32(-np.inf)
    ids_C = np.flatnonzero(logits_V >= lowest)
    logits_C = logits_V[ids_C]
    weights_C = np.exp((logits_C - best) / temperature)
    if params.min_p > 0:
        is_likely = weights_C >= np.float32(params.min_p)
        ids_C, logits_C, weights_C = ids_C[is_likely], logits_C[is_likely], weights_C[is_likely]
    if has_top_k or params.top_p < 1:
        order = np.argsort(-logits_C, kind="stable")
        if has_top_k:
            order = order[: params.top_k]
        if params.top_p < 1:
            cumulative = np.cumsum(weights_C[order], dtype=np.float64)
            order = order[: np.searchsorted(cumulative, params.top_p * cumulative[-1]) + 1]
        order.sort()
        ids_C, weights_C = ids_C[order], weights_C[order]
    return int(ids_C[_pick(weights_C, number)])


def token_logprobs(logits_V: Floats, token_id: int, *, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of a token under softmax(logits), and the `num_top` likeliest tokens.

    The logits must not be NaN or +inf. Log-probabilities below -9999 are given as -9999.
    """
    best = logits_V.max()
    if best == -np.inf:
        logits_V, best = np.zeros_like(logits_V), np.float32(0)
    log_sum = float(best) + float(np.log(np.exp(logits_V - best).sum(dtype=np.float64)))
    ids = [token_id]
    if num_top > 0:
        top = np.flatnonzero(logits_V >= _kth_bound(logits_V, num_top))
        order = np.argsort(-logits_V[top], kind="stable")[:num_top]
        ids += top[order].tolist()
    value = logits_V[token_id]
    rank = 1 + np.count_nonzero(logits_V > value) + np.count_nonzero(logits_V[:token_id] == value)
    logprobs = [max(LOWEST_LOGPROB, float(logits_V[i]) - log_sum) for i in ids]
    return TokenLogprobs(token_ids=ids, logprobs=logprobs, rank=int(rank))


def _within(token_ids: Sequence[int] | NDArray[Any], vocab_size: int) -> Ids:
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def _kth_bound(logits_V: Floats, k: int) -> np.float32:
    """A value that at least k logits reach, close to the k-th largest: of the maxima of blocks, the k-th largest.

    Each of the k largest maxima is a logit of its own, so k logits are at least as large as the smallest of them.
    """
    if k >= len(logits_V):
        return np.float32(-np.inf)
    block_len = max(1, min(_MAX_BLOCK_LEN, len(logits_V) // (4 * k)))
    num_blocks = len(logits_V) // block_len
    # block b holds the logits b, b + num_blocks, ...: maxima of whole rows of memory, which is fast
    maxima_B = logits_V[: num_blocks * block_len].reshape(block_len, num_blocks).max(axis=0)
    return np.float32(np.partition(maxima_B, num_blocks - k)[num_blocks - k])


def _likeliest_by_mass(logits_V: Floats, weights_V: Floats, top_p: float) -> Ids:
    """The ids, ascending, of the fewest likeliest tokens whose weights sum to `top_p` of all the weight."""
    total = float(weights_V.sum(dtype=np.float64))
    wanted = top_p * total
    # V tokens lighter than this weigh less than the part that may be left out
    ids_C = np.flatnonzero(weights_V >= max((total - wanted) / len(weights_V), _SMALLEST_WEIGHT))
    logits_C, weights_C = logits_V[ids_C], weights_V[ids_C]
    # a histogram from the likeliest down shows in which bin the sum is reached; only this bin is sorted
    best, lowest = logits_C.max(), logits_C.min()
    scale = np.float32(_NUM_BINS - 1) / max(best - lowest, np.float32(_NARROWEST_RANGE))
    bins_C = ((best - logits_C) * scale).astype(np.int32)
    bin_sums = np.cumsum(np.bincount(bins_C, weights=weights_C))
    border = min(int(np.searchsorted(bin_sums, wanted)), len(bin_sums) - 1)
    before = bin_sums[border - 1] if border > 0 else 0.0
    in_border = np.flatnonzero(bins_C == border)
    order = in_border[np.argsort(-logits_C[in_border], kind="stable")]
    cumulative = before + np.cumsum(weights_C[order], dtype=np.float64)
    is_kept_C = bins_C < border
    is_kept_C[order[: np.searchsorted(cumulative, wanted) + 1]] = True
    kept: Ids = ids_C[is_kept_C]
    return kept


def _pick(weights_C: Floats, number: float) -> int:
    """The first index whose cumulative weight exceeds `number` times the sum. Weights of 0 are never picked."""
    # sums of blocks first: a running sum over the whole vocabulary costs ten times as much
    starts = np.arange(0, len(weights_C), _SUM_LEN)
    sums = np.cumsum(np.add.reduceat(weights_C, starts, dtype=np.float64))
    wanted = number * sums[-1]
    # the product may round up to the sum itself: then the last index with any weight
    block = min(np.searchsorted(sums, wanted, side="right"), np.searchsorted(sums, sums[-1]))
    before = sums[block - 1] if block > 0 else 0.0
    inside = before + np.cumsum(weights_C[starts[block] : starts[block] + _SUM_LEN], dtype=np.float64)
    index = min(np.searchsorted(inside, wanted, side="right"), np.searchsorted(inside, inside[-1]))
    return int(starts[block] + index)
