"""From settings to a Scheduler and the objects it is made of."""

from __future__ import annotations

from millstream.config import SchedulerConfig
from millstream.messages import WorkerInfo
from millstream.sched.cost_model import DEFAULT_COSTS, CostModel, StepCosts
from millstream.sched.kv_cache_manager import KVCacheManager
from millstream.sched.policy import BalancedPolicy, ChunkPolicy, FixedPolicy
from millstream.sched.scheduler import Scheduler


def first_guess(info: WorkerInfo) -> StepCosts:
    """What a model of these sizes may cost, before any step was measured; only the ratios are meant seriously.

    Two operations for each weight, and as many weights as pairs of bytes. For each pair of tokens four operations for
    each query head and dimension: a KV cache of 16 bits has as many bytes, for each key head; there may be four times
    as many query heads.
    """
    if not info.weight_bytes or not info.kv_cache_bytes:
        return DEFAULT_COSTS
    kv_bytes = info.kv_cache_bytes // (info.num_blocks * info.block_size)
    return StepCosts.from_flops(per_token=info.weight_bytes, per_token_context=4 * kv_bytes)


def make_scheduler(
    config: SchedulerConfig,
    info: WorkerInfo,
    *,
    enable_prefix_caching: bool,
    depth: int,
    prior: StepCosts | None = None,
) -> Scheduler:
    """The scheduler that the settings ask for, for these workers.

    `depth`: stages that steps follow each other through; `prior`: what steps cost before any was measured, where more
    is known than `first_guess`.
    """
    cost_model = CostModel(prior or first_guess(info))
    policy: ChunkPolicy
    if (config.chunk_policy or ("balanced" if depth > 1 else "fixed")) == "balanced":
        policy = BalancedPolicy(
            config.max_num_batched_tokens,
            depth=depth,
            cost_model=cost_model,
            chunk_pipelining=config.chunk_pipelining,
            target_tpot=None if config.target_tpot_ms is None else config.target_tpot_ms / 1000,
        )
    else:
        policy = FixedPolicy(config.max_num_batched_tokens)
    return Scheduler(
        kv_cache=KVCacheManager(
            num_blocks=info.num_blocks, block_size=info.block_size, enable_prefix_caching=enable_prefix_caching
        ),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        policy=policy,
        cost_model=cost_model,
        chunk_pipelining=config.chunk_pipelining,
        async_scheduling=config.async_scheduling,
        num_stages=depth,
        max_steps=config.num_scheduler_steps,
        adaptive_steps=config.adaptive_steps,
    )
