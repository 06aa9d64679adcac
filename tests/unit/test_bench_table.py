"""The table's layout is that of the results published for gLLM #99 and vLLM #8335, character for character."""

from __future__ import annotations

import dataclasses

from millstream.bench.metrics import Metrics, Summary
from millstream.bench.table import render

GLLM = """\
============ Serving Benchmark Result ============
Successful requests:                     32        
Benchmark duration (s):                  94.16     
Total input tokens:                      314732    
Total generated tokens:                  8411      
Request throughput (req/s):              0.34      
Output token throughput (tok/s):         89.32     
Total Token throughput (tok/s):          3431.73   
---------------Time to First Token----------------
Mean TTFT (ms):                          4374.34   
Median TTFT (ms):                        4177.95   
P99 TTFT (ms):                           6679.84   
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          75.85     
Median TPOT (ms):                        75.12     
P99 TPOT (ms):                           185.22    
---------------Inter-token Latency----------------
Mean ITL (ms):                           88.82     
Median ITL (ms):                         42.95     
P99 ITL (ms):                            344.36    
----------------End-to-end Latency----------------
Mean E2EL (ms):                          22068.80  
Median E2EL (ms):                        20669.61  
P99 E2EL (ms):                           46538.70  
==================================================
"""  # noqa: W291

GAP = """\
------Per-token Gap (chunk gap / its tokens)------
Mean PTG (ms):                           70.00     
Median PTG (ms):                         60.50     
P99 PTG (ms):                            80.25     
==================================================
"""  # noqa: W291


def summary(mean: float, median: float, p99: float) -> Summary:
    return Summary(mean=mean, median=median, std=0.0, max=p99, percentiles=((99.0, p99),))


METRICS = Metrics(
    completed=32,
    failed=0,
    duration=94.16,
    total_input_tokens=314732,
    total_output_tokens=8411,
    request_throughput=0.34,
    request_goodput=None,
    output_throughput=89.32,
    total_token_throughput=3431.73,
    ttft=summary(4374.34, 4177.95, 6679.84),
    tpot=summary(75.85, 75.12, 185.22),
    itl=summary(88.82, 42.95, 344.36),
    e2el=summary(22068.80, 20669.61, 46538.70),
    ptg=summary(70.0, 60.5, 80.25),
    client_wait=None,
    tokens_per_chunk=1.0,
)
ALL = ("ttft", "tpot", "itl", "e2el")


def test_rows_are_those_of_the_published_tables_and_the_gap_follows() -> None:
    text = render(METRICS, sections=ALL, percentiles=[99.0]) + "\n"
    head, end = GLLM.rsplit("=" * 50, 1)
    assert text == head + GAP
    assert end == "\n"


def test_without_e2el_it_is_the_table_of_vllm() -> None:
    lines = render(METRICS, sections=("ttft", "tpot", "itl"), percentiles=[99.0]).split("\n")
    assert lines[:20] == GLLM.split("\n")[:20]
    assert lines[20].startswith("------Per-token Gap")


def test_the_gap_comes_with_itl_only() -> None:
    text = render(METRICS, sections=("e2el",), percentiles=[99.0])
    assert "PTG" not in text
    assert "TTFT" not in text
    assert text.count("\n") == 8 + 4


def test_percentiles_goodput_and_what_could_not_be_measured() -> None:
    metrics = dataclasses.replace(
        METRICS,
        request_goodput=0.25,
        tpot=None,
        ttft=Summary(mean=1.0, median=2.0, std=0.0, max=9.0, percentiles=((50.0, 3.0), (99.9, 4.0))),
    )
    lines = render(metrics, sections=("ttft", "tpot"), percentiles=[50.0, 99.9]).split("\n")
    throughput = lines.index("Request throughput (req/s):              0.34      ")
    assert lines[throughput + 1] == "Request goodput (req/s):                 0.25      "
    assert "P50 TTFT (ms):                           3.00      " in lines
    assert "P99.9 TTFT (ms):                         4.00      " in lines
    assert "Mean TPOT (ms):                          n/a       " in lines
