"""Each native kernel's GB/s and GFLOP/s, beside the ceilings measured in the same run.

    python benchmarks/kernels.py [--threads 2] [--dtype bfloat16] [--level avx512_bf16] [--repeat 30] [--only linear]

Shapes are SmolLM2-135M's. Weights and caches are cycled over more memory than the caches hold, as a step does. Figures
are the best of many runs; ceilings are measured again before each group, since the memory of a virtual machine may
have fast and slow minutes. `%` is of the nearer ceiling: the one that allows the least.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from reference_step import tables

from millstream.kernels.native import LEVELS, NativeOps, native_level
from millstream.kernels.native_memory import allocate

LINEAR = {"qkv": (576, 960), "output": (576, 576), "gate_up": (576, 1536), "down": (1536, 576), "head": (576, 49152)}
CYCLED_BYTES = 128 * 2**20
READ_BYTES = 4 * 2**20
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64


@dataclass(frozen=True)
class Ceiling:
    """What this machine does just now."""

    gb_per_s: float
    gflop_per_s: float


def best_seconds(run: Callable[[], object], repeat: int) -> float:
    """The second best: a virtual machine's clock may jump."""
    seconds = []
    for _ in range(max(2, repeat)):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[1]


class Bench:
    """Runs kernels and prints a line for each."""

    def __init__(self, ops: NativeOps, repeat: int) -> None:
        self.ops = ops
        self.repeat = repeat
        self.memory = allocate(CYCLED_BYTES)
        self.memory.fill_(1)

    def ceiling(self) -> Ceiling:
        """Reading memory, and multiplying in registers, and nothing else. In short runs, as the kernels': a long one
        would rarely have the cores for itself."""
        runtime, per_word = self.ops.runtime, 4 // self.ops.dtype.itemsize
        starts = itertools.cycle(range(self.memory.data_ptr(), self.memory.data_ptr() + CYCLED_BYTES, READ_BYTES))
        read = best_seconds(lambda: runtime.read_memory(next(starts), READ_BYTES), 4 * self.repeat)
        count = 80_000 if self.ops.level == "amx" else 5_000
        code = 0 if self.ops.dtype == torch.float32 else 1
        multiply = best_seconds(lambda: runtime.multiply(code, count), 2 * self.repeat)
        flop = count * 32 * 16 * per_word * 2 * self.ops.threads
        return Ceiling(READ_BYTES / read / 1e9, flop / multiply / 1e9)

    def line(self, name: str, run: Callable[[], object], *, num_bytes: float, flop: float, ceiling: Ceiling) -> None:
        seconds = best_seconds(run, self.repeat)
        bound = max(num_bytes / ceiling.gb_per_s, flop / ceiling.gflop_per_s) / 1e9
        print(
            f"{name:28s} {seconds * 1e6:9.1f} us {num_bytes / seconds / 1e9:7.1f} GB/s "
            f"{flop / seconds / 1e9:7.0f} GFLOP/s {100 * bound / seconds:4.0f} %"
        )

    def header(self, title: str) -> Ceiling:
        found = self.ceiling()
        print(f"\n{title}: ceilings {found.gb_per_s:.1f} GB/s, {found.gflop_per_s:.0f} GFLOP/s")
        return found

    def linear(self) -> None:
        for name, (k, n) in LINEAR.items():
            ceiling = self.header(f"linear {name} {k} -> {n}")
            columns = 2 * n if name == "gate_up" else n
            num_bytes = columns * k * self.ops.dtype.itemsize
            part = torch.randn(n, k).to(self.ops.dtype)
            packed = [
                self.ops.pack_gate_up(part, part) if name == "gate_up" else self.ops.pack_linear(part)
                for _ in range(max(1, CYCLED_BYTES // num_bytes))
            ]
            for m in (1, 4, 16, 64, 512):
                if m == 512 and name == "head":
                    continue
                x = torch.randn(m, k).to(self.ops.dtype)
                weights = itertools.cycle(packed)
                call = {
                    "gate_up": lambda x=x, w=weights: self.ops.linear_silu_mul(x, next(w)),
                    "head": lambda x=x, w=weights: self.ops.argmax(x, next(w)),
                }.get(name, lambda x=x, w=weights: self.ops.linear(x, next(w)))
                self.line(f"  {m} rows", call, num_bytes=num_bytes, flop=2 * m * columns * k, ceiling=ceiling)

    def attention(self) -> None:
        shape = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
        width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
        cos_sin = torch.randn(8192, HEAD_DIM)
        for title, loads in {
            "one token each": [(1, 512, 1), (1, 4096, 1), (16, 512, 1), (64, 512, 1)],
            "chunks": [(1, 512, 512), (1, 4096, 512), (8, 576, 64)],
        }.items():
            ceiling = self.header(f"attention, {title}")
            for requests, context, count in loads:
                step = tables(requests, context_len=context, query_len=count)
                num_blocks = int(step.block_table_RB.max()) + 1
                caches = [
                    self.ops.allocate_kv_cache(num_blocks, 32, NUM_KV_HEADS, HEAD_DIM)
                    for _ in range(max(1, min(30, CYCLED_BYTES // (num_blocks * 32 * 768))))
                ]
                for cache in caches:
                    cache.data.view(self.ops.dtype).normal_()
                cycle = itertools.cycle(caches)
                q = torch.randn(requests * count, NUM_HEADS * HEAD_DIM).to(self.ops.dtype)
                qkv = torch.randn(requests * count, width).to(self.ops.dtype)
                keys = requests * sum(range(context - count + 1, context + 1))
                label = f"{requests} x {count} at {context}"
                self.line(
                    f"  {label}",
                    lambda q=q, step=step, c=cycle: self.ops.attention(q, next(c), step, scale=0.125, **shape),
                    num_bytes=requests * context * NUM_KV_HEADS * HEAD_DIM * 2 * self.ops.dtype.itemsize,
                    flop=4 * keys * NUM_HEADS * HEAD_DIM,
                    ceiling=ceiling,
                )
                self.line(
                    f"  {label}, cache write",
                    lambda x=qkv, step=step, c=cycle: self.ops.rotary_and_cache(x, next(c), step, cos_sin, **shape),
                    num_bytes=requests * count * (width + NUM_HEADS * HEAD_DIM) * self.ops.dtype.itemsize,
                    flop=0,
                    ceiling=ceiling,
                )

    def norm(self) -> None:
        ceiling = self.header("rms_norm 576")
        weight = torch.ones(576, dtype=self.ops.dtype)
        for m in (1, 16, 512):
            x = torch.randn(m, 576).to(self.ops.dtype)
            num_bytes = 2 * x.nbytes
            self.line(
                f"  {m} rows",
                lambda x=x: self.ops.rms_norm(x, weight, 1e-5),
                num_bytes=num_bytes,
                flop=0,
                ceiling=ceiling,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--level", default=None, choices=LEVELS)
    parser.add_argument("--quantization", default=None, choices=["int8"])
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--only", default=None, choices=["linear", "attention", "norm"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops = NativeOps(dtype=args.dtype, threads=args.threads, level=args.level, quantization=args.quantization)
    print(f"{ops.level} (best here: {native_level()}), {ops.threads} threads, {args.dtype}")
    bench = Bench(ops, args.repeat)
    for name in ("linear", "attention", "norm"):
        if args.only in (None, name):
            getattr(bench, name)()


if __name__ == "__main__":
    main()
