"""The sampler: from the logits of a step to one token for each request.

A row's token depends on its logits, its parameters, its known tokens and (seed, position), and on nothing else: not on
the other rows, not on how many there are. Greedy rows without extras are settled by one argmax for all of them.

Shapes: R requests of the step, T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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

    @property
    def is_plain(self) -> bool:
        """Whether the token is the likeliest one and nothing else is asked for."""
        return (
            self.params.is_greedy
            and self.params.logprobs is None
            and not sampling_math.has_edits(self.params, self.num_output_tokens)
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token, and its log-probabilities where they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Chooses tokens. Holds no state between calls."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits_RV: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """One token for each row. `logits_RV` is float32 and may be changed.

        Log-probabilities are those of the model: before the bias, the penalties and the temperature. NaN counts as a
        logit of minus infinity. A row in which everything is banned gets the token that was best before the bans.
        """
        assert logits_RV.shape == (len(rows), self._vocab_size), f"logits are {tuple(logits_RV.shape)}"
        if not rows:
            return []
        logits = _on_host(logits_RV)
        best_ids = logits.argmax(axis=1)
        # argmax stops at a NaN, so a finite maximum says that the row has neither NaN nor +inf
        is_sound = np.isfinite(logits[np.arange(len(rows)), best_ids])
        # absurd logits or penalties may overflow: the results are repaired, a warning helps nobody
        with np.errstate(all="ignore"):
            return [
                self._sample_row(logits[r], row, best_id=int(best_ids[r]), is_sound=bool(is_sound[r]))
                for r, row in enumerate(rows)
            ]

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

    def _sample_row(self, logits_V: sampling_math.Floats, row: SamplingRow, *, best_id: int, is_sound: bool) -> Sampled:
        params = row.params
        if not is_sound:
            sampling_math.repair(logits_V)
            best_id = int(logits_V.argmax())
        has_edits = sampling_math.has_edits(params, row.num_output_tokens)
        if row.is_plain:
            return Sampled(best_id)

        # the model's own distribution, so before the edits, for the token chosen after them
        raw_V = logits_V.copy() if has_edits and params.logprobs is not None else logits_V
        if has_edits:
            sampling_math.edit_logits(
                logits_V,
                params=params,
                token_ids=row.token_ids,
                num_prompt_tokens=row.num_prompt_tokens,
                stop_token_ids=row.stop_token_ids,
            )
        token_id = self._choose(logits_V, row, best_id=best_id)
        if params.logprobs is None:
            return Sampled(token_id)
        return Sampled(token_id, sampling_math.token_logprobs(raw_V, token_id, num_top=params.logprobs))

    def _choose(self, logits_V: sampling_math.Floats, row: SamplingRow, *, best_id: int) -> int:
        token_id = int(logits_V.argmax())
        if not np.isfinite(logits_V[token_id]):
            sampling_math.repair(logits_V)
            token_id = int(logits_V.argmax())
            if logits_V[token_id] == -np.inf:
                return best_id
        if row.params.is_greedy:
            return token_id
        seed = row.params.seed
        assert seed is not None, "a request that is not greedy reaches the sampler with its seed set"
        return sampling_math.draw(logits_V, params=row.params, number=uniform(seed, len(row.token_ids)))


def _on_host(logits: Tensor) -> sampling_math.Floats:
    """The logits as a writable NumPy array: the tensor's own memory if it is on the CPU."""
    array: sampling_math.Floats = logits.detach().cpu().numpy()
    return array
