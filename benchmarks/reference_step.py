"""Milliseconds that one step takes with the reference operations.

    python benchmarks/reference_step.py [MODEL] [--dtype bfloat16] [--threads 2] [--context 300] [--repeat 20]

Prints the median and the best of decode steps of 1, 4, 16 and 64 requests, and of one chunk of 512 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from millstream.hub.files import resolve
from millstream.kernels.ops import StepTables, make_ops
from millstream.layers.context import ForwardContext
from millstream.models.arch import ModelArch
from millstream.models.load import load_decoder

BLOCK_SIZE = 32


def tables(num_requests: int, *, context_len: int, query_len: int) -> StepTables:
    """Requests of one length, their blocks interleaved as they would be after a while of serving."""
    num_blocks = -(-context_len // BLOCK_SIZE)
    table_RB = torch.arange(num_requests * num_blocks).view(num_blocks, num_requests).t().contiguous().int() + 1
    positions_T = torch.arange(context_len - query_len, context_len)
    slots_RT = table_RB[:, positions_T // BLOCK_SIZE].long() * BLOCK_SIZE + positions_T % BLOCK_SIZE
    return StepTables(
        positions_T=positions_T.repeat(num_requests).int(),
        slot_mapping_T=slots_RT.flatten().int(),
        query_start_R1=(torch.arange(num_requests + 1) * query_len).int(),
        context_len_R=torch.full((num_requests,), context_len, dtype=torch.int32),
        block_table_RB=table_RB,
        query_lens=(query_len,) * num_requests,
        context_lens=(context_len,) * num_requests,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    files = resolve(args.model)
    arch = ModelArch.from_files(files)
    start = time.perf_counter()
    decoder = load_decoder(files, arch, make_ops("reference", dtype=args.dtype), dtype=args.dtype)
    print(f"load {time.perf_counter() - start:.2f} s")
    loads = [(n, args.context, 1) for n in (1, 4, 16, 64)] + [(1, 512, 512), (1, 2048, 512)]
    caches = decoder.allocate_kv_caches(64 * (-(-args.context // BLOCK_SIZE)) + 65, BLOCK_SIZE)
    for num_requests, context_len, query_len in loads:
        seconds = []
        for _ in range(args.repeat if query_len == 1 else max(3, args.repeat // 4)):
            step = tables(num_requests, context_len=context_len, query_len=query_len)
            token_ids = torch.randint(0, arch.vocab_size, (num_requests * query_len,), dtype=torch.int32)
            start = time.perf_counter()
            hidden_TD = decoder.forward(token_ids, ForwardContext(step, caches))
            decoder.logits(hidden_TD[query_len - 1 :: query_len]).argmax(dim=-1)
            seconds.append(time.perf_counter() - start)
        print(
            f"{num_requests:3d} x {query_len:3d} tokens at context {context_len:5d}: "
            f"median {statistics.median(seconds) * 1e3:6.1f} ms, best {min(seconds) * 1e3:6.1f} ms"
        )


if __name__ == "__main__":
    main()
