"""Figures from hand-made timings: every expected value is worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from millstream.bench.arrivals import arrival_times
from millstream.bench.metrics import RequestRecord, assign_chunk_tokens, compute, has_exact_chunks, is_good, spread


def record(
    start: float, chunks: list[float], *, output_len: int, prompt_len: int = 10, texts: str = ""
) -> RequestRecord:
    r = RequestRecord(
        arrival=start,
        start=start,
        end=chunks[-1],
        prompt_len=prompt_len,
        output_len=output_len,
        has_usage=True,
        chunk_times=chunks,
        chunk_texts=texts.split("|") if texts else ["x"] * len(chunks),
    )
    assign_chunk_tokens(r)
    return r


# Two answers: one of 4 tokens in 4 chunks, one of 5 tokens in 2 chunks (1 + 4: by characters).
A = record(100.0, [100.5, 100.6, 100.8, 101.1], output_len=4)
B = record(101.0, [101.2, 102.2], output_len=5, prompt_len=30, texts="a|bcde")


def test_latencies_of_one_request() -> None:
    assert A.ttft == pytest.approx(0.5)
    assert A.e2el == pytest.approx(1.1)
    assert A.tpot == pytest.approx(0.2)
    assert A.itls == pytest.approx([0.1, 0.2, 0.3])
    assert B.tpot == pytest.approx(1.0 / 4)


def test_answers_of_one_token_have_no_tpot() -> None:
    assert record(1.0, [2.0], output_len=1).tpot is None
    assert compute([record(1.0, [2.0], output_len=1)]).tpot is None


def test_totals_and_throughputs() -> None:
    failed = RequestRecord(arrival=100.0, start=100.0, end=102.0, prompt_len=99, error="HTTP 503: full")
    m = compute([A, B, failed])
    assert (m.completed, m.failed) == (2, 1)
    assert m.duration == pytest.approx(2.2)
    assert (m.total_input_tokens, m.total_output_tokens) == (40, 9)
    assert m.request_throughput == pytest.approx(2 / 2.2)
    assert m.output_throughput == pytest.approx(9 / 2.2)
    assert m.total_token_throughput == pytest.approx(49 / 2.2)
    assert m.request_goodput is None


def test_ttft_and_tpot_are_over_requests_and_itl_over_chunks() -> None:
    m = compute([A, B], percentiles=[50, 99])
    assert m.ttft is not None
    assert m.tpot is not None
    assert m.itl is not None
    assert m.e2el is not None
    assert m.ttft.mean == pytest.approx(350.0)
    assert m.ttft.std == pytest.approx(150.0)  # of the population
    assert [p for p, _ in m.ttft.percentiles] == [50, 99]
    assert [v for _, v in m.ttft.percentiles] == pytest.approx([350.0, 200 + 0.99 * 300])
    assert m.tpot.mean == pytest.approx((200 + 250) / 2)
    assert m.itl.mean == pytest.approx((100 + 200 + 300 + 1000) / 4)
    assert m.itl.median == pytest.approx(250.0)
    assert m.itl.max == pytest.approx(1000.0)
    # 99 % of the way from the first to the fourth of four samples: 0.97 between the last two.
    assert m.itl.percentiles[1][1] == pytest.approx(300 + 0.97 * 700)
    assert m.e2el.mean == pytest.approx((1100 + 1200) / 2)


def test_per_token_gap_counts_each_token_of_a_chunk() -> None:
    m = compute([A, B])
    assert m.ptg is not None
    # A: 100, 200, 300; B's second chunk of four tokens after 1000 ms: four times 250.
    samples = [100, 200, 300, 250, 250, 250, 250]
    assert m.ptg.mean == pytest.approx(np.mean(samples))
    assert m.ptg.median == pytest.approx(250.0)
    assert m.tokens_per_chunk == pytest.approx(9 / 6)


def test_gap_mean_equals_tpot_for_one_answer_whose_first_chunk_is_one_token() -> None:
    m = compute([B])
    assert m.ptg is not None
    assert m.tpot is not None
    assert m.ptg.mean == pytest.approx(m.tpot.mean)


def test_nothing_succeeded() -> None:
    m = compute([RequestRecord(start=1.0, end=1.5, error="no")])
    assert (m.completed, m.failed, m.request_throughput) == (0, 1, 0.0)
    assert m.ttft is None
    assert m.itl is None
    assert m.ptg is None


def test_whole_answers_have_only_e2el() -> None:
    m = compute([A], streamed=False)
    assert (m.ttft, m.tpot, m.itl, m.ptg, m.tokens_per_chunk) == (None, None, None, None, None)
    assert m.e2el is not None


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    assert compute([A, B], goodput={"ttft": 300.0}).request_goodput == pytest.approx(1 / 2.2)
    assert compute([A, B], goodput={"ttft": 600.0, "tpot": 260.0}).request_goodput == pytest.approx(2 / 2.2)
    assert compute([A, B], goodput={"ttft": 600.0, "tpot": 210.0}).request_goodput == pytest.approx(1 / 2.2)
    assert compute([A, B], goodput={"e2el": 1000.0}).request_goodput == 0.0


def test_a_one_token_answer_keeps_any_tpot_limit() -> None:
    assert is_good(record(1.0, [2.0], output_len=1), {"tpot": 0.0})


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (4, [1, 1], [2, 2]),
        (10, [1, 4], [2, 8]),
        (5, [1, 1, 1], [2, 2, 1]),
        (3, [5, 1, 9], [1, 1, 1]),
        (2, [5, 1, 9], [1, 1, 1]),
        (6, [100, 0, 0], [4, 1, 1]),
        (4, [0, 0, 0], [2, 1, 1]),
    ],
)
def test_spread(total: int, weights: list[int], expected: list[int]) -> None:
    assert spread(total, weights) == expected


def test_spread_keeps_the_total() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        weights = [int(w) for w in rng.integers(0, 30, size=rng.integers(1, 12))]
        total = int(rng.integers(len(weights), 200))
        counts = spread(total, weights)
        assert sum(counts) == total
        assert min(counts) >= 1


def test_the_token_that_ends_an_answer_has_no_chunk() -> None:
    r = record(1.0, [1.1, 1.2, 1.3], output_len=4, texts="a|bbbbbb|c")
    assert not has_exact_chunks(r)
    assert r.chunk_tokens == [1, 2, 1]
    r.finish_reason = "stop"
    assign_chunk_tokens(r)
    assert r.chunk_tokens == [1, 1, 1]


def test_usage_with_every_chunk_tells_its_tokens() -> None:
    r = record(1.0, [1.1, 1.2, 1.3], output_len=9)
    r.chunk_totals = [1, 7, 9]
    assign_chunk_tokens(r)
    assert r.chunk_tokens == [1, 6, 2]


def test_a_tokenizers_counts_go_before_characters() -> None:
    r = record(1.0, [1.1, 1.2], output_len=8, texts="aaaaaaa|b")
    assign_chunk_tokens(r, [1, 3])
    assert r.chunk_tokens == [2, 6]


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0, float("inf")])
def test_arrivals_end_at_n_over_rate(burstiness: float) -> None:
    times = arrival_times(200, rate=8.0, burstiness=burstiness, seed=3)
    assert len(times) == 200
    assert times[-1] == pytest.approx(25.0)
    assert times == sorted(times)
    assert times[0] > 0


def test_arrivals_depend_on_the_seed_alone() -> None:
    assert arrival_times(50, rate=2.0, seed=1) == arrival_times(50, rate=2.0, seed=1)
    assert arrival_times(50, rate=2.0, seed=1) != arrival_times(50, rate=2.0, seed=2)


def test_burstiness_shapes_the_waits() -> None:
    def variation(burstiness: float) -> float:
        waits = np.diff(arrival_times(4000, rate=1.0, burstiness=burstiness, seed=0))
        return float(waits.std() / waits.mean())

    # A gamma distribution's standard deviation is its mean / sqrt(shape).
    assert variation(1.0) == pytest.approx(1.0, rel=0.08)
    assert variation(4.0) == pytest.approx(0.5, rel=0.08)
    assert variation(0.25) == pytest.approx(2.0, rel=0.15)
    assert variation(float("inf")) == pytest.approx(0.0, abs=1e-6)


def test_rate_inf_sends_all_at_once() -> None:
    assert arrival_times(3, rate=float("inf")) == [0.0, 0.0, 0.0]
