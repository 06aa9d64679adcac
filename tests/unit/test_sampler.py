"""The sampler against a plain implementation that sorts the whole vocabulary, and its promises about batches."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.native import NativeOps, native_available, native_unavailable_reason
from millstream.kernels.random import philox4x32, uniform
from millstream.request import SamplingParams
from millstream.worker import sampling_math
from millstream.worker.sampler import NativeDraw, Sampled, Sampler, SamplingRow

VOCAB_SIZE = 1000


def make_row(*token_ids: int, num_prompt_tokens: int = 0, stop: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**{"seed": 1, **params}), token_ids, num_prompt_tokens, stop)


def make_logits(num_rows: int, *, vocab_size: int = VOCAB_SIZE, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Rows with many ties, as logits that were bfloat16 have."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * scale).bfloat16().float()


def sample_one(logits_V: torch.Tensor | list[float], row: SamplingRow) -> Sampled:
    logits = torch.as_tensor(logits_V, dtype=torch.float32).clone()[None]
    return Sampler(logits.shape[1]).sample(logits, [row])[0]


def kept_by_full_sort(logits: np.ndarray, params: SamplingParams) -> tuple[list[int], np.ndarray]:
    """The token ids that the parameters keep, ascending, and the weights of all tokens."""
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature)).astype(np.float64)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if weights[i] >= np.float32(params.min_p)]
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i]
        if params.top_p < 1 and mass >= params.top_p * total:
            break
    return sorted(kept), weights


def draw_by_full_sort(logits: np.ndarray, params: SamplingParams, number: float) -> int:
    kept, weights = kept_by_full_sort(logits, params)
    total = sum(weights[i] for i in kept)
    mass = 0.0
    for i in kept:
        mass += weights[i]
        if mass > number * total:
            return i
    return kept[-1]


choices = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.1, 2.0),
        "top_k": st.sampled_from([0, -1, 1, 2, 7, 50, 300, 999, 1000, 5000]),
        "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.0, 0.001, 0.1, 1.0]),
    }
)


@settings(max_examples=200, deadline=None)
@given(params=choices, seed=st.integers(0, 2**32), scale=st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0]))
def test_draw_equals_that_of_a_full_sort(params: dict[str, Any], seed: int, scale: float) -> None:
    logits = make_logits(1, seed=seed, scale=scale)[0].numpy()
    p = SamplingParams(**params)
    for number in (0.0, uniform(seed, 0), 1 - 1e-9):
        assert sampling_math.draw(logits.copy(), params=p, number=number) == draw_by_full_sort(logits, p, number)
    # here the rounding of the sums decides which of the last tokens it is, but never one without weight
    kept, weights = kept_by_full_sort(logits, p)
    last = sampling_math.draw(logits, params=p, number=1 - 2.0**-53)
    assert last in kept
    assert weights[last] > 0


@pytest.mark.parametrize("params", [{}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}, {"top_p": 0.95, "temperature": 2}])
def test_draw_equals_that_of_a_full_sort_for_a_real_vocabulary_size(params: dict[str, Any]) -> None:
    logits = make_logits(1, vocab_size=49152)[0].numpy()
    p = SamplingParams(**params)
    kept, weights = kept_by_full_sort(logits, p)
    sums = np.cumsum(weights[kept])
    for position in range(20):
        number = uniform(3, position)
        expected = kept[int(np.searchsorted(sums, number * sums[-1], side="right"))]
        assert sampling_math.draw(logits, params=p, number=number) == expected


def test_frequencies_follow_the_softmax() -> None:
    logits = [math.log(4), 0.0, float("-inf"), math.log(3)]
    drawn = Counter(sample_one(logits, SamplingRow(SamplingParams(seed=9), range(n), 0)).token_id for n in range(4000))
    assert drawn[2] == 0
    for token_id, probability in ((0, 4 / 8), (1, 1 / 8), (3, 3 / 8)):
        # within five standard deviations, for a fixed seed
        assert abs(drawn[token_id] / 4000 - probability) < 5 * math.sqrt(probability * (1 - probability) / 4000)


VARIED_ROWS = [
    make_row(1, 2, 3, temperature=0),
    make_row(1, 2, 3),
    make_row(4, 5, 6, 6, num_prompt_tokens=1, temperature=0.7, top_k=40, top_p=0.9, seed=-5),
    make_row(7, temperature=1.3, top_p=0.95, seed=2**63 - 1),
    make_row(8, 9, 9, num_prompt_tokens=1, temperature=0, frequency_penalty=1.5, repetition_penalty=1.3, logprobs=3),
    make_row(8, 9, min_p=0.02, logprobs=0),
    make_row(10, temperature=0, logit_bias={77: 100.0}),
    make_row(10, 11, temperature=0, logprobs=5),
    make_row(10, 11, temperature=2, top_k=1),
]


def test_row_is_the_same_alone_and_in_any_batch() -> None:
    logits = make_logits(len(VARIED_ROWS), vocab_size=5003)
    logits[3, 17] = float("nan")
    sampler = Sampler(5003)
    alone = [sampler.sample(logits[r : r + 1].clone(), [row])[0] for r, row in enumerate(VARIED_ROWS)]
    together = sampler.sample(logits.clone(), VARIED_ROWS)
    assert together == alone
    backwards = sampler.sample(logits.flip(0).clone(), VARIED_ROWS[::-1])
    assert backwards[::-1] == alone
    many = sampler.sample(logits.repeat(5, 1), VARIED_ROWS * 5)
    assert many == alone * 5


def test_token_depends_on_seed_and_position() -> None:
    logits = make_logits(1, scale=0.5)[0]
    by_seed = {sample_one(logits, make_row(1, 2, seed=s)).token_id for s in range(30)}
    by_position = {sample_one(logits, make_row(*range(n))).token_id for n in range(30)}
    assert len(by_seed) > 10
    assert len(by_position) > 10
    assert sample_one(logits, make_row(1, 2)) == sample_one(logits, make_row(7, 8))


def test_greedy_takes_the_lowest_id_of_the_best() -> None:
    assert sample_one([0.0, 2.0, 1.0, 2.0], make_row(temperature=0)).token_id == 1
    # the same where the row does not take the short way
    row = make_row(temperature=0, logit_bias={0: 2.0, 1: -1.0, 2: 1.0})
    assert sample_one([0.0, 2.0, 1.0, 2.0], row).token_id == 0


def test_top_k_keeps_the_lowest_ids_of_equal_logits() -> None:
    logits = np.zeros(500, dtype=np.float32)
    drawn = {sampling_math.draw(logits, params=SamplingParams(top_k=3), number=n / 100) for n in range(100)}
    assert drawn == {0, 1, 2}


def test_tiny_temperature_is_as_good_as_greedy() -> None:
    logits = make_logits(1)[0]
    best = int(logits.argmax())
    assert sample_one(logits, make_row(temperature=1e-300, top_p=0.9)).token_id == best
    assert sample_one(logits, make_row(temperature=1e-5)).token_id == best


def penalised(logits: list[float], **row: Any) -> list[float]:
    values = np.array(logits, dtype=np.float32)
    token_ids, num_prompt_tokens, stop = row.pop("token_ids"), row.pop("num_prompt_tokens", 0), row.pop("stop", ())
    sampling_math.edit_logits(
        values,
        params=SamplingParams(**row),
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        stop_token_ids=stop,
    )
    return [round(float(v), 5) for v in values]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    got = penalised([2, -2, 2, 0], token_ids=[0, 1, 1, 0], num_prompt_tokens=1, repetition_penalty=2)
    assert got == [1, -4, 2, 0]


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    got = penalised(
        [1, 1, 1, 1],
        token_ids=[0, 0, 1, 1, 1, 2],
        num_prompt_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    assert got == [1, 1 - 0.5 - 0.75, 1 - 0.5 - 0.25, 1]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (-1, [0.5, 0.5, 0.25, 0.0]),
        (0, [1, 1, 1, 1]),
        (1, [1, 1, 1, 0.25]),
        (2, [1, 1, 0.25, 0.25]),
        (3, [1, 1, 0.25, 0.0]),
        (4, [1, 0.5, 0.25, 0.0]),
        (99, [0.5, 0.5, 0.25, 0.0]),
    ],
)
def test_penalties_look_at_the_last_n_tokens(window: int, expected: list[float]) -> None:
    got = penalised(
        [1, 1, 1, 1],
        token_ids=[0, 1, 3, 2, 3],
        num_prompt_tokens=2,
        repetition_penalty=2,
        frequency_penalty=0.25,
        repeat_last_n=window,
    )
    assert got == expected


def test_logit_bias_comes_before_the_penalties() -> None:
    got = penalised([1, -3, 0], token_ids=[0, 1], logit_bias={0: 3.0, 1: 5.0, 2: -1.5}, repetition_penalty=2)
    assert got == [2, 1, -1.5]


def test_ids_outside_the_vocabulary_are_skipped() -> None:
    got = penalised([1, 1], token_ids=[-1, 5, 1], stop=(9,), min_tokens=8, logit_bias={7: 1.0}, frequency_penalty=1)
    assert got == [1, 0]


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    logits = [0.0, 5.0, 9.0, 1.0]
    assert sample_one(logits, make_row(0, 0, num_prompt_tokens=1, stop=(2,), temperature=0, min_tokens=2)).token_id == 1
    row = make_row(0, 0, 0, num_prompt_tokens=1, stop=(2,), temperature=0, min_tokens=2)
    assert sample_one(logits, row).token_id == 2


def test_row_with_everything_banned_gets_the_best_before_the_bans() -> None:
    for temperature in (0, 1):
        row = make_row(stop=(0, 1, 2), min_tokens=1, temperature=temperature)
        assert sample_one([0.0, 5.0, 1.0], row).token_id == 1


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5, "logprobs": 2}]
)
def test_bad_logits_neither_crash_nor_touch_other_rows(params: dict[str, Any]) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan] * 4, [-inf] * 4, [nan, 3, -inf, nan], [0, inf, 1, -inf], [0, 0, 50, 0]])
    rows = [make_row(1, **params)] * 5
    got = Sampler(4).sample(logits, rows)
    assert [s.token_id for s in got] == [0, 0, 1, 1, 2]
    if got[0].logprobs is not None:
        assert got[0].logprobs.logprobs[0] == pytest.approx(math.log(1 / 4))
        assert all(math.isfinite(v) for s in got for v in (s.logprobs or got[0].logprobs).logprobs)


def test_penalty_that_overflows_is_repaired() -> None:
    row = make_row(0, 1, repetition_penalty=1e-300, temperature=0.5, top_p=0.9)
    assert sample_one([1.0, -1.0, 5.0], row).token_id == 0


def test_logprobs_are_those_of_the_untouched_logits() -> None:
    logits = make_logits(1)[0]
    expected = torch.log_softmax(logits.double(), 0)
    row = make_row(5, 5, temperature=0.5, logit_bias={123: 100.0}, frequency_penalty=2, logprobs=4)
    got = sample_one(logits, row)
    assert got.token_id == 123
    assert got.logprobs is not None
    order = sorted(range(VOCAB_SIZE), key=lambda i: (-logits[i].item(), i))
    assert got.logprobs.token_ids == [123, *order[:4]]
    assert got.logprobs.logprobs == pytest.approx([expected[i].item() for i in got.logprobs.token_ids], abs=1e-5)
    assert got.logprobs.rank == order.index(123) + 1


def test_logprobs_without_top_tokens() -> None:
    got = sample_one([0.0, 0.0, 0.0, 0.0], make_row(temperature=0, logprobs=0)).logprobs
    assert got is not None
    assert (got.token_ids, got.rank) == ([0], 1)
    assert got.logprobs == pytest.approx([math.log(1 / 4)])


def test_impossible_token_has_a_finite_logprob() -> None:
    row = make_row(temperature=0, stop=(1,), min_tokens=1, logprobs=1)
    got = sample_one([-math.inf, 0.0, -1e30], row).logprobs
    assert got is not None
    assert (got.token_ids, got.logprobs, got.rank) == ([2, 1], [sampling_math.LOWEST_LOGPROB, 0.0], 2)


def test_prompt_logprobs() -> None:
    logits = make_logits(7, vocab_size=300)
    token_ids = [0, 299, 5, 5, 17, 100, 200]
    expected = torch.log_softmax(logits.double(), 1)
    got = Sampler(300).prompt_logprobs(logits.clone(), token_ids, 2)
    for t, token_id in enumerate(token_ids):
        order = sorted(range(300), key=lambda i: (-logits[t, i].item(), i))
        assert got[t].token_ids == [token_id, *order[:2]]
        assert got[t].logprobs == pytest.approx([expected[t, i].item() for i in got[t].token_ids], abs=1e-5)
        assert got[t].rank == order.index(token_id) + 1


def test_no_rows_give_no_tokens() -> None:
    assert Sampler(10).sample(torch.empty(0, 10), []) == []
    assert Sampler(10).prompt_logprobs(torch.empty(0, 10), [], 3) == []


def test_known_tokens_may_be_an_array() -> None:
    logits = make_logits(1)[0]
    row = make_row(4, 5, 6, num_prompt_tokens=1, repetition_penalty=1.5, presence_penalty=1, temperature=0.8)
    array_row = dataclasses.replace(row, token_ids=np.array(row.token_ids, dtype=np.int32))
    assert sample_one(logits, array_row) == sample_one(logits, row)


def test_philox_gives_the_published_words() -> None:
    """The known answers for philox4x32-10 that come with the authors' Random123 library."""
    ones = 0xFFFFFFFF
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_numbers() -> None:
    assert uniform(0, 0) == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
    assert uniform(1 << 40, 5) != uniform(0, 5)
    assert uniform(0, 1 << 40) != uniform(0, 0)
    numbers = [uniform(7, position) for position in range(2000)]
    assert all(0 <= n < 1 for n in numbers)
    assert len(set(numbers)) == 2000
    assert abs(sum(numbers) / 2000 - 0.5) < 5 / math.sqrt(12 * 2000)


@pytest.mark.skipif(not native_available(), reason=native_unavailable_reason())
def test_the_native_draw_chooses_as_numpys_does() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_RV = torch.randn(64, 5000, generator=generator) * 3
    rows = [
        SamplingRow(
            params=SamplingParams(
                temperature=0.2 + 0.02 * i,
                top_k=(0, 5, 300)[i % 3],
                top_p=(1.0, 0.9)[i % 2],
                min_p=0.01 * (i % 4),
                seed=i,
            ),
            token_ids=[0] * (i + 1),
            num_prompt_tokens=1,
        )
        for i in range(64)
    ]
    native = Sampler(5000, draw=NativeDraw(NativeOps(dtype="float32", threads=2)))
    found = [s.token_id for s in native.sample(logits_RV.clone(), rows)]
    assert found == [s.token_id for s in Sampler(5000).sample(logits_RV.clone(), rows)]
    assert len(set(found)) > 20
