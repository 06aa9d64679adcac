"""One rank: loads its share of the model, allocates its KV cache, runs steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from millstream.config import EngineConfig
from millstream.hub.files import ModelFiles, resolve
from millstream.kernels.native import NativeOps
from millstream.kernels.ops import Ops, make_ops
from millstream.messages import ModelRunnerOutput, NewRequest, SchedulerOutput, WorkerInfo
from millstream.models.arch import ModelArch
from millstream.models.load import load_decoder
from millstream.models.sizes import model_bytes, stage_bytes
from millstream.parallel.context import ParallelContext
from millstream.request import SamplingParams
from millstream.worker.input_batch import InputBatch
from millstream.worker.kv_cache import KVCachePlan, available_memory, plan_kv_cache
from millstream.worker.links import MakeEnds, own_ends
from millstream.worker.model_runner import ModelRunner
from millstream.worker.outlet import PROMPT_LOGPROB_ROWS
from millstream.worker.sampler import NativeDraw, Sampler
from millstream.worker.step_graph import make_graph


class Worker:
    """Runs the steps that it is given, in order. The same for one process and for many.

    `context` says which stage it is, `make_ends` what connects it with the others; without them it is the whole model.
    """

    def __init__(
        self, config: EngineConfig, *, context: ParallelContext | None = None, make_ends: MakeEnds = own_ends
    ) -> None:
        self._config = config
        self._context = context or ParallelContext()
        self._make_ends = make_ends
        self._opened: tuple[ModelFiles, ModelArch] | None = None
        self._phases: dict[str, float] = {}
        self._runner: ModelRunner | None = None

    def start(self, on_progress: Callable[[int, int], None]) -> WorkerInfo:
        """Load and allocate. Raises ModelError or ConfigError."""
        return self.load(self.plan(), on_progress)

    def plan(self) -> KVCachePlan:
        """What there is room for, seen before the weights are read: what does not fit is told at once.

        The plan is for the whole model on this host, so that its stages, planning at about the same time, agree but
        for what the free memory changed meanwhile. Raises ModelError or ConfigError.
        """
        _, arch, dtype = self._open()
        stages = [
            ParallelContext(r, self._context.world_size, self._context.layer_split).stage(arch.num_layers)
            for r in range(self._context.world_size)
        ]
        weight_bytes = model_bytes(arch, stages, dtype, quantization=self._config.model.quantization)
        return plan_kv_cache(
            self._config.cache,
            bytes_per_token=arch.kv_bytes_per_token(dtype),
            model_len=arch.max_position,
            max_model_len=self._config.model.max_model_len,
            available=available_memory() - weight_bytes,
        )

    def load(self, plan: KVCachePlan, on_progress: Callable[[int, int], None]) -> WorkerInfo:
        """Load this stage's weights and allocate the plan's blocks for its layers. Raises ModelError or ConfigError."""
        config = self._config
        files, arch, dtype = self._open()
        stage = self._context.stage(arch.num_layers)
        ops = self._make_ops(arch, dtype)
        with self._phase("weights"):
            model = load_decoder(
                files,
                arch,
                ops,
                dtype=dtype,
                stage=stage,
                max_len=plan.max_model_len,
                progress=on_progress,
            )
        self._opened = None
        with self._phase("KV cache"):
            kv_caches = model.allocate_kv_caches(plan.num_blocks, plan.block_size)
        max_tokens, max_rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
        batch = InputBatch(num_slots=max_rows, max_model_len=plan.max_model_len, block_size=plan.block_size)
        graph = make_graph(model, ops, kv_caches, max_tokens=max_tokens, max_rows=max(max_rows, PROMPT_LOGPROB_ROWS))
        sampler = Sampler(arch.vocab_size, draw=NativeDraw(ops) if isinstance(ops, NativeOps) else None)
        inlet, outlet = self._make_ends(arch, dtype, graph, batch, sampler)
        self._runner = ModelRunner(graph=graph, batch=batch, inlet=inlet, outlet=outlet, device=torch.device("cpu"))
        with self._phase("warm-up"):
            self._warm_up(batch)
        return WorkerInfo(
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_model_len=plan.max_model_len,
            vocab_size=arch.vocab_size,
            eos_token_ids=list(arch.eos_token_ids),
            weight_bytes=stage_bytes(arch, stage, dtype, quantization=config.model.quantization),
            kv_cache_bytes=plan.num_bytes * stage.num_layers // arch.num_layers,
            dtype=dtype,
            phases=self._phases,
        )

    def execute(self, step: SchedulerOutput, on_compute: Callable[[], None] = lambda: None) -> ModelRunnerOutput | None:
        """Run one step; what it brought, from the last stage, None from the others.

        `on_compute` is called when all is ready to be computed, which from then on takes no interpreter lock.
        """
        assert self._runner is not None, "the worker was not started"
        return self._runner.execute(step, on_compute)

    def next_step_id(self) -> int | None:
        """The decision whose step must be next, on a stage that follows another; waits to know it. None: any."""
        assert self._runner is not None, "the worker was not started"
        return self._runner.next_step_id()

    def shutdown(self) -> None:
        """Give the memory back."""
        self._runner = None

    def _open(self) -> tuple[ModelFiles, ModelArch, str]:
        """The files, the architecture, and the type to compute in. Kept until the weights are loaded."""
        if self._opened is None:
            files = resolve(self._config.model.model, cache_dir=self._config.model.cache_dir)
            self._opened = files, ModelArch.from_files(files)
        files, arch = self._opened
        return files, arch, arch.compute_dtype(self._config.model.dtype)

    def _make_ops(self, arch: ModelArch, dtype: str) -> Ops:
        threads = self._config.parallel.threads or len(os.sched_getaffinity(0))
        ops = make_ops(
            self._config.parallel.kernels,
            dtype=dtype,
            threads=threads,
            head_dim=arch.head_dim,
            block_size=self._config.cache.block_size,
            quantization=self._config.model.quantization,
            is_pinned=self._config.parallel.pin_threads,
        )
        # two pools that spin on the same cores would slow each other down
        torch.set_num_threads(threads if ops.name == "reference" else 1)
        return ops

    def _warm_up(self, batch: InputBatch) -> None:
        """One token through the model, so that the first request does not pay for what is set up at first use.

        Stages warm up together: each takes what the one before it hands on.
        """
        new = NewRequest("warm-up", [0], 1, SamplingParams(temperature=0), [], [0], 0)
        self.execute(SchedulerOutput(-1, [], [new], ["warm-up"], [0], [1], [[]], [1]))
        batch.forget(["warm-up"])

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._phases[name] = time.monotonic() - started
