"""How long a step takes, as a stage feels it: learnt from the steps that were measured.

    seconds = step + token * T + token_context * TC + decode * D + decode_context * DC

T prompt tokens, each of which attends to what lies before it and to itself: TC such pairs in all; D decodes, with DC
tokens of context together. Only ratios matter for filling steps evenly, so it works before anything was measured.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass


@dataclass(slots=True)
class StepLoad:
    """What a step computes, counted."""

    num_tokens: int = 0
    """Prompt tokens."""
    token_context: int = 0
    """Sum, over the prompt tokens, of the tokens they attend to."""
    num_decodes: int = 0
    decode_context: int = 0
    """Sum, over the decodes, of the tokens they attend to."""

    def add_chunk(self, start: int, count: int) -> None:
        """Tokens `start` to `start + count` of one prompt."""
        self.num_tokens += count
        self.token_context += count * start + count * (count + 1) // 2


@dataclass(frozen=True)
class StepCosts:
    """Seconds for each unit of a StepLoad, and for a step at all."""

    step: float
    token: float
    token_context: float
    decode: float
    decode_context: float

    @classmethod
    def from_flops(
        cls, *, per_token: int, per_token_context: int, flops_per_second: float = 1e11, step_overhead_tokens: int = 16
    ) -> StepCosts:
        """A first guess from a stage's floating-point operations: for a token, and for a pair of attention.

        A step at all is worth so many tokens, for the weights are read once whatever their number. A decode's attention
        reads keys that no other row shares, so its pairs are taken to cost four times a prompt's.
        """
        token, pair = per_token / flops_per_second, per_token_context / flops_per_second
        return cls(token * step_overhead_tokens, token, pair, token, 4 * pair)


# a decoder of 1e8 weights whose attention is a small part of its work
DEFAULT_COSTS = StepCosts.from_flops(per_token=200_000_000, per_token_context=70_000)

_NUM_FIRST = 8  # steps whose median sets the scale
_NOISE = 0.05  # of a measurement, relative
_DRIFT = 1e-4  # variance that each factor gains with every step, so that old measurements fade
_COMMON_DRIFT = 2e-4  # variance that all gain in common: a machine gets slower or faster at everything
_MAX_VARIANCE = 0.25  # what is not seen for long is not doubted for ever
_MIN_FACTOR = 0.02  # of the first guess: no cost becomes zero or negative


class CostModel:
    """Predicts a step's seconds; `observe` corrects it.

    The first measured steps set one common scale. From then on each cost is the first guess times a factor that a
    Kalman filter follows: recursive least squares on relative errors, in which factors may drift instead of old steps
    being forgotten, so that what does not occur for an hour (prompts, say) is not unlearnt. An error counts at most
    three times as much as errors usually are, so a step during which the machine was busy elsewhere does little harm.
    """

    def __init__(self, prior: StepCosts = DEFAULT_COSTS) -> None:
        self._unit = [prior.step, prior.token, prior.token_context, prior.decode, prior.decode_context]
        self._first: list[tuple[StepLoad, float]] = []
        self._first_ratios: list[float] = []
        self._factor = [1.0] * 5
        self._variance = [[_MAX_VARIANCE if i == j else 0.0 for j in range(5)] for i in range(5)]
        self._spread = 0.2
        self._costs = prior

    @property
    def costs(self) -> StepCosts:
        """What each unit is taken to cost now, in seconds."""
        return self._costs

    def predict(self, load: StepLoad) -> float:
        """Seconds of a step."""
        c = self._costs
        return (
            c.step
            + c.token * load.num_tokens
            + c.token_context * load.token_context
            + c.decode * load.num_decodes
            + c.decode_context * load.decode_context
        )

    def chunk_seconds(self, start: int, count: int) -> float:
        """What tokens `start` to `start + count` of a prompt add to a step."""
        return self._costs.token * count + self._costs.token_context * count * (start + (count + 1) / 2)

    def tokens_within(self, seconds: float, start: int) -> int:
        """The longest chunk from token `start` on that adds at most so many seconds; 0 where none does."""
        if seconds <= 0:
            return 0
        pair = self._costs.token_context
        first = self._costs.token + pair * (start + 0.5)
        # the root of pair/2 n^2 + first n = seconds, in the form that stands pair = 0
        return int(2 * seconds / (first + math.sqrt(first * first + 2 * pair * seconds)))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that took so many seconds on its slowest stage."""
        if not 0 < seconds < math.inf:
            return
        if len(self._first) < _NUM_FIRST:
            self._set_scale(load, seconds)
        else:
            self._correct(load, seconds)
        self._costs = StepCosts(*(u * f for u, f in zip(self._unit, self._factor, strict=True)))

    def _set_scale(self, load: StepLoad, seconds: float) -> None:
        self._first.append((load, seconds))
        # `costs` are the first guess in the scale found so far: one common factor moves them all
        scale = statistics.median(self._first_ratios) if self._first_ratios else 1.0
        self._first_ratios.append(seconds / self.predict(load) * scale)
        change = statistics.median(self._first_ratios) / scale
        self._unit = [u * change for u in self._unit]
        if len(self._first) == _NUM_FIRST:
            for first_load, first_seconds in self._first:
                self._correct(first_load, first_seconds)

    def _correct(self, load: StepLoad, seconds: float) -> None:
        counts = (1, load.num_tokens, load.token_context, load.num_decodes, load.decode_context)
        parts = [n * u for n, u in zip(counts, self._unit, strict=True)]
        predicted = sum(p * f for p, f in zip(parts, self._factor, strict=True))
        h = [p / predicted for p in parts]
        error = seconds / predicted - 1
        limit = 3 * self._spread
        error = max(-limit, min(error, limit))
        # grows by at most a fifth: a new normal is believed after a few steps, a single outlier is not
        self._spread = max(0.02, self._spread + 0.1 * (abs(error) - self._spread))
        doubt = [sum(v * x for v, x in zip(row, h, strict=True)) for row in self._variance]
        total = sum(d * x for d, x in zip(doubt, h, strict=True)) + _NOISE**2
        for i, d in enumerate(doubt):
            self._factor[i] = max(_MIN_FACTOR, self._factor[i] + d / total * error)
            row = self._variance[i]
            for j, other in enumerate(doubt):
                row[j] += _COMMON_DRIFT - d * other / total
            if row[i] < _MAX_VARIANCE:
                row[i] += _DRIFT
