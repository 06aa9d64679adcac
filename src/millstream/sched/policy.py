"""How many tokens for whom this step: ints in, ints out."""

from __future__ import annotations

from collections.abc import Sequence


def split_budget(num_new_tokens: Sequence[int], budget: int) -> list[int]:
    """Share out `budget` tokens among requests with so many tokens to compute, in the order of their rank.

    Whoever needs a single token (a decode, mostly) comes first, so that no answer stalls behind a long prompt;
    the rest goes to the prompts in order.
    """
    shares = [0] * len(num_new_tokens)
    for wants_one in (True, False):
        for i, num_new in enumerate(num_new_tokens):
            if (num_new == 1) is wants_one and budget > 0:
                shares[i] = min(num_new, budget)
                budget -= shares[i]
    return shares
