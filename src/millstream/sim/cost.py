"""What a batch costs on a stage, from the model's shape and a hardware profile.

    a layer = linear + attention of chunks + attention of decodes + element-wise work + overhead + all-reduce
    each of them: max(operations / (peak x share), bytes / (bandwidth x share))

A stage has its layers; the last one also the head, for the rows that are sampled. Tensor parallelism divides operations
and bytes and adds two all-reduces a layer. With int8, linear layers and head read 8-bit weights with their scales, and
multiply at the profile's peak for int8 where it tells one. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.config import CacheConfig, ParallelConfig
from millstream.errors import ConfigError
from millstream.messages import SchedulerOutput, WorkerInfo
from millstream.models.arch import DTYPE_BYTES, ModelArch
from millstream.models.sizes import INT8_GROUP, layer_parameters, stage_bytes
from millstream.parallel.stage import Stage, stages_of
from millstream.sim.executor import StepTimes
from millstream.sim.hardware import GIB, HardwareProfile, ShareTable
from millstream.worker.stage_cost import choose_layer_split

US = 1e-6


@dataclass(frozen=True, slots=True)
class BatchShape:
    """All that the cost of a step depends on."""

    num_tokens: int
    num_rows: int
    num_sampled: int
    decode_reads: int
    """Cached tokens read by rows of one token, summed."""
    chunk_reads: int
    """The same for rows of several tokens."""
    chunk_pairs: int
    """Pairs of a token and one that it sees, of rows of several tokens."""


def shape_of(step: SchedulerOutput, window: int | None = None) -> BatchShape:
    """The shape of a step, where a token sees at most `window` tokens (None: all before it)."""
    starts, counts = step.num_computed_tokens, step.num_scheduled_tokens
    num_rows, num_tokens = len(counts), sum(counts)
    decode_reads = chunk_reads = chunk_pairs = 0
    if num_tokens == num_rows and window is None:
        # most steps are decodes alone, and this runs for every one
        decode_reads = sum(starts) + num_rows
    else:
        for start, count in zip(starts, counts, strict=True):
            if window is None:
                reads, pairs = start + count, count * start + count * (count + 1) // 2
            else:
                # token i of the row (from 1) sees min(start + i, window) tokens
                growing = min(max(window - start, 0), count)
                reads = min(start + count, window + count - 1)
                pairs = growing * start + growing * (growing + 1) // 2 + (count - growing) * window
            if count == 1:
                decode_reads += reads
            else:
                chunk_reads += reads
                chunk_pairs += pairs
    # the middle chunks of prompts want 0
    num_sampled = num_rows - step.num_sampled_tokens.count(0)
    return BatchShape(num_tokens, num_rows, num_sampled, decode_reads, chunk_reads, chunk_pairs)


class CostModel:
    """A model cut into stages on one kind of hardware; says what steps cost and how many blocks the KV cache has.

    Raises ConfigError where the model can't be cut like that, or the hardware does not tell its speed in `dtype`.
    """

    def __init__(
        self,
        arch: ModelArch,
        hardware: HardwareProfile,
        *,
        dtype: str,
        parallel: ParallelConfig,
        tensor_parallel_size: int = 1,
        quantization: str | None = None,
    ) -> None:
        if arch.num_kv_heads % tensor_parallel_size and tensor_parallel_size % arch.num_kv_heads:
            raise ConfigError(
                f"--tensor-parallel-size is {tensor_parallel_size}: "
                f"{arch.num_kv_heads} key/value heads can't be shared out evenly"
            )
        self.stages: list[Stage] = stages_of(choose_layer_split(arch, parallel))
        self.arch = arch
        self.hardware = hardware
        self.dtype = dtype
        self.quantization = quantization
        self.num_stages = len(self.stages)
        self._layers = [(s.num_layers, sum(arch.window_of(i) is None for i in s.layers)) for s in self.stages]
        """Of each stage: its layers, and how many of them see the whole context."""
        self.tensor_parallel_size = self._tp = tensor_parallel_size
        self._width = DTYPE_BYTES[dtype]
        self._peak = self._linear_peak = hardware.peak(dtype)
        self._weight_width: float = self._width
        """Bytes of a parameter of a linear layer."""
        if quantization == "int8":
            self._weight_width = 1 + 2 / INT8_GROUP
            if "int8" in hardware.peak_tflops:
                self._linear_peak = hardware.peak("int8")
        self._compute = ShareTable(hardware.linear_compute)
        self._bandwidth = ShareTable(hardware.linear_bandwidth)
        self._layer_params = layer_parameters(arch)
        self._kv_width = 2 * max(arch.num_kv_heads / tensor_parallel_size, 1) * arch.head_dim * self._width

    def __call__(self, step: SchedulerOutput) -> StepTimes:
        shape, hardware = shape_of(step), self.hardware
        layer = self.layer_seconds(shape)
        windowed = layer
        if self.arch.sliding_window is not None:
            windowed = self.layer_seconds(shape_of(step, self.arch.sliding_window))
        overhead = hardware.step_us * US
        stages = [num_full * layer + (num - num_full) * windowed + overhead for num, num_full in self._layers]
        stages[-1] += self.head_seconds(shape.num_sampled)
        if not shape.num_rows:
            # all its requests were forgotten: the stages take their turn, and compute nothing
            stages = [0.0] * self.num_stages
        send_bytes = shape.num_tokens * self.arch.hidden_size * self._width
        return StepTimes(
            host=(hardware.host_step_us + hardware.host_row_us * shape.num_rows) * US,
            stages=stages,
            send=hardware.link_latency_us * US + send_bytes / (hardware.link_gbs * 1e9),
            back=hardware.return_us * US,
            # a few bytes for each token
            to_first=hardware.link_latency_us * US,
        )

    def layer_seconds(self, shape: BatchShape) -> float:
        """One layer's time for a batch."""
        arch, hardware, bandwidth = self.arch, self.hardware, self.hardware.bandwidth
        rows = shape.num_tokens
        linear = self._linear(self._layer_params, rows)
        # norms, rotation, residuals, the product of gate and up: read and written once each
        passes = 10 * arch.hidden_size + (2 * arch.qkv_size + 4 * arch.intermediate_size) / self._tp
        element_wise = rows * passes * self._width / (bandwidth * self._bandwidth(rows))
        attention = self.attention_seconds(shape)
        return linear + attention + element_wise + hardware.layer_us * US + self._all_reduces(rows)

    def attention_seconds(self, shape: BatchShape) -> float:
        """The attention of one layer."""
        arch, hardware = self.arch, self.hardware
        pair = 4 * arch.num_heads * arch.head_dim / self._tp / (self._peak * hardware.attention_compute)
        read = self._kv_width / (hardware.bandwidth * hardware.attention_bandwidth)
        chunks = max(shape.chunk_pairs * pair, shape.chunk_reads * read)
        return chunks + max(shape.decode_reads * pair, shape.decode_reads * read)

    def head_seconds(self, num_sampled: int) -> float:
        """Logits and sampling of so many rows."""
        if num_sampled == 0:
            return 0.0
        params = self.arch.hidden_size * self.arch.vocab_size
        return self._linear(params, num_sampled) + num_sampled * self.hardware.sampled_row_us * US

    def _linear(self, params: float, rows: int) -> float:
        params /= self._tp
        compute = 2 * rows * params / (self._linear_peak * self._compute(rows))
        return max(compute, params * self._weight_width / (self.hardware.bandwidth * self._bandwidth(rows)))

    def _all_reduces(self, rows: int) -> float:
        """Two a layer, by rings: each device sends 2 (n-1)/n of the data, in 2 (n-1) hops."""
        if self._tp == 1:
            return 0.0
        num_bytes = rows * self.arch.hidden_size * self._width
        hops = 2 * (self._tp - 1)
        return 2 * (
            hops * self.hardware.link_latency_us * US + num_bytes * hops / self._tp / self.hardware.link_gbs / 1e9
        )

    # -- memory ---------------------------------------------------------------------------------------------------

    def stage_weight_bytes(self, stage: Stage) -> int:
        """Bytes of weights that each device of a stage holds."""
        # a tied head in 8 bits is another table than the embedding
        is_shared = self.quantization is None
        return (
            stage_bytes(self.arch, stage, self.dtype, quantization=self.quantization, is_head_shared=is_shared)
            // self._tp
        )

    def plan(self, cache: CacheConfig, *, max_model_len: int | None) -> WorkerInfo:
        """What the workers would tell after their start: the least of the stages' numbers of blocks, and so on.

        The KV cache gets `--kv-cache-memory`, for the whole model as in a real run, else all that the weights leave.
        Raises ConfigError where nothing is left, or `max_model_len` does not fit.
        """
        arch, usable = self.arch, self.hardware.usable_bytes
        if max_model_len is not None and max_model_len > arch.max_position:
            raise ConfigError(
                f"--max-model-len is {max_model_len}: this model's context holds {arch.max_position} tokens"
            )
        block_bytes = [stage.num_layers * self._kv_width * cache.block_size for stage in self.stages]
        counts = []
        for number, stage in enumerate(self.stages):
            left = usable - self.stage_weight_bytes(stage)
            wanted = float(left)
            if cache.kv_cache_memory is not None:
                wanted = cache.kv_cache_memory * GIB / self._tp * block_bytes[number] / sum(block_bytes)
            if wanted > left or left <= 0:
                lacking = (
                    f"no KV cache of {wanted / GIB:.1f} GiB fits" if left > 0 else "nothing is left for a KV cache"
                )
                raise ConfigError(
                    f"stage {number} on {self.hardware.name} has {usable / GIB:.1f} GiB to use and its weights take "
                    f"{self.stage_weight_bytes(stage) / GIB:.1f} GiB: {lacking} (more stages or more tensor "
                    "parallelism share the weights)"
                )
            counts.append(int(wanted // block_bytes[number]))
        num_blocks = min(counts)
        capacity = num_blocks * cache.block_size
        wanted_len = max_model_len or min(arch.max_position, capacity)
        if wanted_len > capacity or capacity < 2:
            raise ConfigError(
                f"the KV cache on {self.hardware.name} holds {capacity} tokens: fewer than --max-model-len "
                f"({max_model_len or 2})"
            )
        return WorkerInfo(
            num_blocks=num_blocks,
            block_size=cache.block_size,
            max_model_len=wanted_len,
            vocab_size=arch.vocab_size,
            eos_token_ids=[],
            weight_bytes=sum(self.stage_weight_bytes(s) for s in self.stages) * self._tp,
            kv_cache_bytes=int(num_blocks * sum(block_bytes) * self._tp),
            dtype=self.dtype,
            phases={},
        )
