"""The compiled kernels (csrc/module.cpp). Arrays are addresses; nothing here checks them."""

class LinearWeight:
    def __init__(
        self, type: int, num_inputs: int, num_outputs: int, is_gate_up: bool, words: int, bias: int, /
    ) -> None: ...
    def panel_words(self) -> int: ...
    def num_panels(self) -> int: ...

class StepTables:
    def __init__(
        self,
        num_tokens: int,
        num_requests: int,
        block_stride: int,
        positions: int,
        slots: int,
        query_start: int,
        context_len: int,
        block_table: int,
        /,
    ) -> None: ...

class KVCache:
    def __init__(
        self, dtype: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, data: int, /
    ) -> None: ...

class _Operations:
    def linear(
        self,
        weight: LinearWeight,
        dtype: int,
        epilogue: int,
        num_rows: int,
        x: int,
        x_stride: int,
        residual: int,
        out: int,
        out_stride: int,
        ids: int,
        /,
    ) -> None: ...
    def rms_norm(self, dtype: int, num_rows: int, width: int, eps: float, x: int, weight: int, out: int, /) -> None: ...
    def gather(self, num_rows: int, row_bytes: int, num_table_rows: int, ids: int, table: int, out: int, /) -> None: ...
    def rotary_and_cache(
        self,
        tables: StepTables,
        cache: KVCache,
        num_heads: int,
        qkv: int,
        cos_sin: int,
        num_positions: int,
        q_norm: int,
        k_norm: int,
        eps: float,
        q: int,
        /,
    ) -> None: ...
    def attention(
        self,
        tables: StepTables,
        cache: KVCache,
        num_heads: int,
        scale: float,
        window: int,
        q: int,
        out: int,
        /,
    ) -> None: ...

class Runtime(_Operations):
    def __init__(self, level: int, num_threads: int, is_pinned: bool, /) -> None: ...
    def level(self) -> int: ...
    def num_threads(self) -> int: ...
    def pack(
        self,
        type: int,
        dtype: int,
        num_inputs: int,
        num_outputs: int,
        weight: int,
        up: int,
        words: int,
        /,
    ) -> None: ...
    def read_memory(self, data: int, num_bytes: int, /) -> None: ...
    def multiply(self, dtype: int, count: int, /) -> None: ...
    def row_stats(self, num_rows: int, vocab: int, logits: int, ids: int, best: int, log_sum: int, /) -> None: ...
    def draw(
        self,
        num_rows: int,
        vocab: int,
        logits: int,
        temperature: int,
        top_k: int,
        top_p: int,
        min_p: int,
        number: int,
        ids: int,
        /,
    ) -> None: ...

class Plan(_Operations):
    def __init__(self, runtime: Runtime, max_rows: int, /) -> None: ...
    def num_ops(self) -> int: ...
    def op_name(self, index: int, /) -> str: ...
    def run(self, num_rows: int, tables: StepTables | None, ids: int, seconds: int, /) -> None: ...

def best_level() -> int: ...
def dequantize(type: int, dtype: int, num_blocks: int, data: int, out: int, /) -> bool: ...
