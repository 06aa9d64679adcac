"""For tests of pipelines: a tiny random model, and an executor that serves one engine core after the other."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import zmq
from safetensors.torch import save_file

from millstream.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.executor.base import Executor, OnProgress, WaitingExecutor, Wake, make_executor
from millstream.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput, WorkerInfo
from millstream.request import Request, SamplingParams

BLOCK_SIZE = 16
NUM_LAYERS = 4
VOCAB = 160
MAX_TOKENS = 128
_ids = itertools.count()

Answer = tuple[list[int], list[Any], list[Any]]
"""Token ids, and log-probabilities of them and of the prompt where asked for."""


def save_tiny_model(folder: Path) -> Path:
    """A Llama of 4 layers with random weights, in float32."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    tensors = {"model.embed_tokens.weight": random(VOCAB, 64) * 3, "model.norm.weight": random(64) + 1}
    for i in range(NUM_LAYERS):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": random(64) + 1,
            layer + "post_attention_layernorm.weight": random(64) + 1,
            layer + "self_attn.q_proj.weight": random(64, 64),
            layer + "self_attn.k_proj.weight": random(32, 64),
            layer + "self_attn.v_proj.weight": random(32, 64),
            layer + "self_attn.o_proj.weight": random(64, 64),
            layer + "mlp.gate_proj.weight": random(96, 64),
            layer + "mlp.up_proj.weight": random(96, 64),
            layer + "mlp.down_proj.weight": random(64, 96),
        }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def engine_config(model: Path, *, dtype: str = "float32", **parallel: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype=dtype),
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_memory=0.004),
        # a worker keeps a slot for what the last core did not tell it to forget
        scheduler=SchedulerConfig(max_num_seqs=2000, max_num_batched_tokens=MAX_TOKENS),
        parallel=ParallelConfig(**{"threads": 2, **parallel}),
    )


class Started:
    """An executor that runs already, for a new EngineCore; with fewer blocks if wanted."""

    def __init__(self, executor: Executor, info: WorkerInfo, *, num_blocks: int | None = None) -> None:
        self.depth = executor.depth
        self.executor = executor
        self.info = WorkerInfo(**{f: getattr(info, f) for f in info.__struct_fields__})
        if num_blocks is not None:
            self.info.num_blocks = num_blocks
            self.info.max_model_len = min(info.max_model_len, num_blocks * BLOCK_SIZE)
        self.steps: list[SchedulerOutput] = []

    def start(self, on_progress: OnProgress) -> WorkerInfo:
        return self.info

    def submit(self, step: SchedulerOutput) -> list[Future[ModelRunnerOutput]]:
        self.steps.append(step)
        return self.executor.submit(step)

    def wait(self, wake: Wake | None = None) -> None:
        assert isinstance(self.executor, WaitingExecutor)
        self.executor.wait(wake)

    def kill(self) -> None:
        raise AssertionError("nobody asked for it")

    def shutdown(self) -> None:
        pass


class Pipeline:
    """A running executor of P stages."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = make_executor(config)
        self.info = self.executor.start(lambda done, total: None)

    def core(
        self,
        *,
        chunk: int = MAX_TOKENS,
        max_num_seqs: int = 16,
        num_blocks: int | None = None,
        cache: CacheConfig | None = None,
        **scheduler: Any,
    ) -> EngineCore:
        """A new engine over the stages."""
        config = EngineConfig(
            cache=cache or CacheConfig(),
            scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=max_num_seqs, **scheduler),
        )
        return EngineCore(config, Started(self.executor, self.info, num_blocks=num_blocks))


class Session:
    """Requests in one core, and what they were answered."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0

    def add(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        name = f"r{next(_ids)}"
        self.answers[name] = ([], [], [])
        self.requests[name] = self.core.add(EngineRequest(name, list(prompt), params))
        return self.requests[name]

    def step(self, wake: Wake | None = None) -> None:
        outputs = self.core.step(wake=wake)
        if outputs is None:
            return
        assert outputs.stats is not None
        self.num_preemptions += outputs.stats.num_preemptions
        for name, token_ids in zip(outputs.request_ids, outputs.new_token_ids, strict=True):
            self.answers[name][0].extend(token_ids)
            self.answers[name][1].extend((p.token_ids, p.logprobs, p.rank) for p in outputs.logprobs.get(name, []))
        for name, news in outputs.prompt_logprobs.items():
            # a preempted request's prompt is judged again
            self.answers[name][2][news.first_position - 1 :] = [
                (p.token_ids, p.logprobs, p.rank) for p in news.logprobs
            ]

    def run(self) -> list[Answer]:
        """Until nothing is open; asserts that all blocks are free then."""
        while self.core.has_work:
            self.step()
        self.core.check_integrity()
        pool = self.core.scheduler.kv_cache.pool
        assert pool.num_free == pool.num_blocks
        return list(self.answers.values())

    def run_until(self, condition: Callable[[], bool], wake: Wake) -> None:
        """Until it holds between two calls of `step`, with steps left in flight. `wake` can be read all the time."""
        while not condition():
            assert self.core.has_work, "it never was so"
            self.step(wake)
            time.sleep(0.0005)  # else this loop keeps the interpreter from the worker's thread


def always_readable(context: zmq.Context[Any]) -> tuple[Wake, Wake]:
    """A socket with a message that nobody takes, and the one that sent it."""
    readable, sender = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    readable.bind("inproc://always-readable")
    sender.connect("inproc://always-readable")
    sender.send(b"")
    assert readable.poll(10000)
    return readable, sender
