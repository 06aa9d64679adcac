"""SamplingParams refuse what can't be, naming field, value and limit; a Request counts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from millstream.errors import InvalidRequestError
from millstream.request import MAX_SEED, FinishReason, Request, SamplingParams, nth_seed


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens is 0: it must be from 1 to"),
        ("temperature", 2.5, "temperature is 2.5: it must be from 0 to 2"),
        ("temperature", math.nan, "temperature is nan"),
        ("temperature", math.inf, "temperature is inf"),
        ("top_p", 0, "top_p is 0: it must be over 0 and at most 1"),
        ("top_p", math.nan, "top_p is nan"),
        ("top_k", -2, "top_k is -2: it must be from -1 to"),
        ("min_p", 1.5, "min_p is 1.5: it must be from 0 to 1"),
        ("presence_penalty", -3, "presence_penalty is -3: it must be from -2 to 2"),
        ("repetition_penalty", 0, "repetition_penalty is 0: it must be over 0 and at most 10"),
        ("logprobs", 21, "logprobs is 21: it must be from 0 to 20"),
        ("n", 0, "n is 0: it must be from 1 to 128"),
        ("seed", 2**63, "seed is 9223372036854775808"),
        ("stop", ("",), "stop: each string must have 1 to 512 characters"),
        ("stop", ("a",) * 17, "stop has 17 strings: at most 16 are taken"),
        ("stop_token_ids", (1,) * 257, "stop_token_ids has 257 ids: at most 256 are taken"),
        ("logit_bias", {1: 101.0}, "logit_bias: each value must be from -100 to 100"),
        ("logit_bias", {1: math.nan}, "logit_bias: each value must be from -100 to 100"),
    ],
)
def test_bad_values_name_field_value_and_limit(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert message in caught.value.message
    assert caught.value.param == field


def test_min_tokens_is_within_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 5: it can't be over max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_token_ids_are_within_the_vocabulary() -> None:
    SamplingParams(stop_token_ids=(0, 99), logit_bias={99: 1.0}).check_vocab(100)
    with pytest.raises(InvalidRequestError, match="stop_token_ids has token id 100: ids of this model go from 0 to 99"):
        SamplingParams(stop_token_ids=(100,)).check_vocab(100)
    with pytest.raises(InvalidRequestError, match="logit_bias has token id -1"):
        SamplingParams(logit_bias={-1: 1.0}).check_vocab(100)


def test_seeds_count_up_and_around() -> None:
    assert [nth_seed(5, i) for i in range(3)] == [5, 6, 7]
    assert nth_seed(MAX_SEED, 1) == -MAX_SEED - 1
    assert nth_seed(-1, 1) == 0


def test_a_requests_counters() -> None:
    request = Request(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=10),
        stop_token_ids=frozenset({7}),
        max_model_len=6,
    )
    assert (request.num_tokens, request.num_new_tokens, request.max_num_tokens) == (3, 3, 6)
    request.num_in_flight_tokens = 2
    assert (request.num_scheduled_until, request.num_new_tokens) == (2, 1)
    assert request.append_token(5) is None
    assert request.append_token(5) is None
    # the context of 6 ends it before its 10 tokens do
    assert request.append_token(5) is FinishReason.LENGTH
    assert request.num_output_tokens == 3
