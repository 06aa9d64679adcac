"""What one generation is: its SamplingParams, its state (Request), how it can end (FinishReason).

A Request is a few integers; everything else is derived. `num_tokens` are known (prompt and output),
`num_computed_tokens` have their keys and values settled in the KV cache, `num_in_flight_tokens` are being
computed by steps that have not landed yet, which sample `num_pending_tokens`. The scheduler moves computed towards
known and pending; there are no phases.
"""

from __future__ import annotations

import enum
import math

import msgspec

from millstream.errors import ContextLengthError, InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 512
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_N = 128
MAX_SEED = 2**63 - 1


class FinishReason(enum.IntEnum):
    """Why a request ended. `str()` gives OpenAI's word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when it stops.

    Raises InvalidRequestError, naming the field, the value and the limit, when a value is out of range.
    """

    max_tokens: int | None = None
    """Tokens to generate at most; None: as many as the context holds."""
    min_tokens: int = 0
    """Before this many tokens no end-of-text and no stop token is chosen."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Choose among the k likeliest tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens whose probabilities sum to this."""
    min_p: float = 0.0
    """Choose among tokens at least this fraction as likely as the likeliest."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repeat_last_n: int = -1
    """The penalties look at the last n tokens; -1: all of them, 0: none."""
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    """Same seed, same prompt: same text, whatever else runs. None: the engine draws one."""
    stop: tuple[str, ...] = ()
    """Text that ends the answer; it is not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    n: int = 1
    """Number of answers to one prompt."""

    def __post_init__(self) -> None:
        for field, low, high in _RANGES:
            value = getattr(self, field)
            # written so that NaN fails too
            if value is not None and not (low <= value <= high):
                raise InvalidRequestError(f"{field} is {value}: it must be from {low} to {high}", param=field)
        if not (0 < self.repetition_penalty <= 10):
            raise InvalidRequestError(
                f"repetition_penalty is {self.repetition_penalty}: it must be over 0 and at most 10",
                param="repetition_penalty",
            )
        if not (0 < self.top_p <= 1):
            raise InvalidRequestError(f"top_p is {self.top_p}: it must be over 0 and at most 1", param="top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}: it can't be over max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(self.stop)} strings: at most {MAX_STOP_STRINGS} are taken", param="stop"
            )
        if any(not 0 < len(s) <= MAX_STOP_STRING_LEN for s in self.stop):
            raise InvalidRequestError(
                f"stop: each string must have 1 to {MAX_STOP_STRING_LEN} characters", param="stop"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids: at most {MAX_STOP_TOKEN_IDS} are taken",
                param="stop_token_ids",
            )
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(bias)} entries: at most {MAX_LOGIT_BIAS} are taken", param="logit_bias"
            )
        if any(not (-100 <= b <= 100) for b in bias.values()):
            raise InvalidRequestError("logit_bias: each value must be from -100 to 100", param="logit_bias")

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidRequestError where a token id lies outside the vocabulary."""
        for field, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias or ()))):
            for i in ids:
                if not 0 <= i < vocab_size:
                    raise InvalidRequestError(
                        f"{field} has token id {i}: ids of this model go from 0 to {vocab_size - 1}", param=field
                    )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repeat_last_n != 0 and (
            self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0, 2),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repeat_last_n", -1, 2**31 - 1),
    ("seed", -MAX_SEED - 1, MAX_SEED),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_N),
)


class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class Request:
    """One generation, as the scheduler sees it."""

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        stop_token_ids: frozenset[int],
        max_model_len: int,
        priority: int = 0,
        cache_salt: str = "",
        arrival_time: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.stop_token_ids = stop_token_ids
        """The request's own stop ids and, unless ignore_eos, the model's end-of-text ids."""
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival_time = arrival_time
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        room = max_model_len - self.num_prompt_tokens
        self.max_output_tokens = min(room, sampling_params.max_tokens or room)
        self.max_num_tokens = self.num_prompt_tokens + self.max_output_tokens
        """Prompt and longest possible output."""
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_pending_tokens = 0
        """Tokens that steps in flight sample: only the workers know them."""
        self.pending_step_id = -1
        """The last step that samples some."""
        self.num_cached_tokens = 0
        """Prompt tokens whose keys and values came from the prefix cache when it was first scheduled."""
        self.num_preemptions = 0
        """Its epoch: results of steps scheduled under an earlier epoch are dropped."""
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        """The stop token that ended it, if one did."""
        self.first_token_time = math.nan

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_scheduled_until(self) -> int:
        """Tokens computed once all steps in flight have landed."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_new_tokens(self) -> int:
        """Known and pending tokens that no step has been given yet."""
        return self.num_tokens + self.num_pending_tokens - self.num_scheduled_until

    @property
    def num_wanted_tokens(self) -> int:
        """Output tokens to come after the known and pending ones, unless it stops before."""
        return self.max_num_tokens - self.num_tokens - self.num_pending_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append_token(self, token_id: int) -> FinishReason | None:
        """Take one sampled token; returns why the request ends with it, or None."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens >= self.sampling_params.min_tokens:
            self.stop_reason = token_id
            return FinishReason.STOP
        if self.num_output_tokens >= self.max_output_tokens:
            return FinishReason.LENGTH
        return None


def nth_seed(seed: int, index: int) -> int:
    """The seed of answer number `index` to a request: counted up, and around where the range ends."""
    return (seed + index + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1


def check_fits(num_prompt_tokens: int, max_tokens: int | None, *, max_model_len: int) -> None:
    """Raise ContextLengthError where a prompt and the answer asked for are longer than the context."""
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens: this model's context holds {max_model_len}, "
            f"so a prompt may have {max_model_len - 1}",
            param="prompt",
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, "
            f"{num_prompt_tokens + max_tokens} in all: this model's context holds {max_model_len}",
            param="max_tokens",
        )
