"""How many tokens for whom this step: ints in, ints out, seconds as floats.

A ChunkPolicy says how many decodes a step takes and opens a budget for its prompts. The scheduler then offers the
budget to the prompts in turn, and each `grant` is a chunk:

    first in rank      at most half of the budget
    shortest first     what is left, the first in rank included

So a short prompt behind a huge one starts at once, in the half that the huge one leaves, and a huge prompt behind a
stream of short ones moves as soon as it is first in rank, at half speed or better. Nobody starves: a prompt is done no
later than in twice the time that first come, first served would take. (Two orders at half speed each; of the schemes
that are fair to both ends it is the one that needs no state.)
"""

from __future__ import annotations

import math
from typing import Protocol

from millstream.sched.cost_model import CostModel, StepLoad

FIRST_SHARE = 0.5
"""Of a step's prompt budget that the prompt first in rank is sure of."""
MIN_CHUNK = 16
"""Tokens for which the balanced policy adds another prompt to a step; long chunks are a multiple of it."""
MIN_PROGRESS = 4
"""Tokens that it computes of some prompt where decodes alone take all the time."""

_MEMORY = 4  # rounds of steps


class StepBudget(Protocol):
    """What a step has left for prompts."""

    def has_room(self, start: int) -> bool:
        """Whether a prompt computed up to token `start` can get something."""
        ...

    def grant(self, *, wanted: int, start: int, share: float = 1.0) -> int:
        """Take from the budget, or from this share of it, a chunk of up to `wanted` tokens from token `start` on.

        Asked only where there is room for some prompt; gives at least one token.
        """
        ...


class ChunkPolicy(Protocol):
    """Decides how much a step computes."""

    def max_decodes(self, num_decoding: int, *, num_ready: int, num_in_flight: int) -> int:
        """How many decodes a step may hold.

        `num_ready` requests want a single token, `num_decoding` have begun to answer (some of them are in flight), and
        there are `num_in_flight` steps before this one.
        """
        ...

    def open_step(self, decodes: StepLoad, *, backlog: StepLoad, num_decoding: int) -> StepBudget:
        """The budget for prompts of a step with these decodes. `backlog`: all open prompts, whole."""
        ...


class TokenBudget:
    """A number of tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def has_room(self, start: int) -> bool:
        return self._num_tokens > 0

    def grant(self, *, wanted: int, start: int, share: float = 1.0) -> int:
        count = min(wanted, math.ceil(self._num_tokens * share))
        self._num_tokens -= count
        return count


class FixedPolicy:
    """Every step up to `max_num_batched_tokens`, all decodes first."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens

    def max_decodes(self, num_decoding: int, *, num_ready: int, num_in_flight: int) -> int:
        return num_ready

    def open_step(self, decodes: StepLoad, *, backlog: StepLoad, num_decoding: int) -> StepBudget:
        return TokenBudget(self.max_num_batched_tokens - decodes.num_decodes)


class TimeBudget:
    """A number of seconds, and of tokens at most. Some prompt gets a chunk even where no time is left."""

    def __init__(self, num_tokens: int, seconds: float, cost_model: CostModel) -> None:
        self._num_tokens = num_tokens
        self._seconds = seconds
        self._cost_model = cost_model
        self._is_untouched = True

    def has_room(self, start: int) -> bool:
        return self._num_tokens > 0 and (
            self._is_untouched or self._seconds >= self._cost_model.chunk_seconds(start, MIN_CHUNK)
        )

    def grant(self, *, wanted: int, start: int, share: float = 1.0) -> int:
        count = max(self._cost_model.tokens_within(self._seconds * share, start), MIN_PROGRESS)
        if count >= 8 * MIN_CHUNK:
            count -= count % MIN_CHUNK
        # a last chunk of a few tokens would cost a whole step more
        if wanted - count <= count // 16:
            count = wanted
        count = min(count, self._num_tokens)
        self._num_tokens -= count
        self._seconds -= self._cost_model.chunk_seconds(start, count)
        self._is_untouched = False
        return count


class BalancedPolicy:
    """Steps of about equal predicted time, for `depth` steps that follow each other through as many stages.

    - Decodes are spread: a step takes no more than its part, of all and of those ready. One that is passed over is in
      one of the next `depth - 1` steps, for these can't all be full without it.
    - Prompts fill a step up to a target time, so later chunks of a long prompt are smaller, as attention grows.
    - The target is the best for the prompts there are. Computing W seconds of prompts in steps of t seconds, f of
      which are fixed (decodes included), takes (W / (t - f) + depth - 1) * t, least for
      t = f + sqrt(W * f / (depth - 1)).
    - If anyone decodes or did some steps ago, it is at most M / depth, where M is the time that
      `max_num_batched_tokens` of the prompts there are take on average. So a decode, which waits for the steps around
      it, waits no longer than it would with one stage. But prompts get at least as much of a step as is fixed.
    - Otherwise it is at most F, the time of a prompt's first `max_num_batched_tokens`; and always at least
      F / (2 depth).
    - `target_tpot` seconds bound it too: the `depth` steps around a decode are to take no longer.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        *,
        depth: int,
        cost_model: CostModel,
        chunk_pipelining: bool = True,
        target_tpot: float | None = None,
    ) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.depth = depth
        self.cost_model = cost_model
        self.target_tpot = target_tpot
        # where chunks of one prompt do not overlap, cutting it gains nothing
        self._num_followers = depth - 1 if chunk_pipelining else 0
        self._num_steps_since_decodes = _MEMORY * depth

    def max_decodes(self, num_decoding: int, *, num_ready: int, num_in_flight: int) -> int:
        num_free = max(self.depth - num_in_flight, 1)
        return min(-(-max(num_decoding, num_ready) // self.depth), -(-num_ready // num_free))

    def open_step(self, decodes: StepLoad, *, backlog: StepLoad, num_decoding: int) -> StepBudget:
        fixed = self.cost_model.predict(decodes)
        # short answers come and go: a target that followed them would alternate between steps
        self._num_steps_since_decodes = 0 if num_decoding else self._num_steps_since_decodes + 1
        is_decoding = self._num_steps_since_decodes < _MEMORY * self.depth
        seconds = self.target_seconds(fixed, backlog=backlog, is_decoding=is_decoding)
        return TimeBudget(self.max_num_batched_tokens - decodes.num_decodes, seconds - fixed, self.cost_model)

    def target_seconds(self, fixed: float, *, backlog: StepLoad, is_decoding: bool) -> float:
        """How long a step should take of which `fixed` seconds do not depend on its prompts."""
        costs = self.cost_model.costs
        work = self.cost_model.predict(backlog) - costs.step
        first = costs.step + self.cost_model.chunk_seconds(0, self.max_num_batched_tokens)
        mean = max(first, costs.step + work / max(backlog.num_tokens, 1) * self.max_num_batched_tokens)
        low = first / (2 * self.depth)
        high = max(mean / self.depth if is_decoding else first, 2 * fixed)
        best = high
        if self._num_followers:
            best = fixed + math.sqrt(work * fixed / self._num_followers)
        seconds = min(max(best, low), high)
        return seconds if self.target_tpot is None else min(seconds, self.target_tpot / self.depth)
