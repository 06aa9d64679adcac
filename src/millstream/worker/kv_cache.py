"""How many blocks the KV cache gets. Imports no torch: `millstream check` plans too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from millstream.config import CacheConfig
from millstream.errors import ConfigError

GIB = 2**30
_DEFAULT_SHARE = 0.25
_DEFAULT_MOST = 4 * GIB


@dataclass(frozen=True)
class KVCachePlan:
    """The cache's size, and the longest request that is taken with it."""

    num_blocks: int
    block_size: int
    num_bytes: int
    max_model_len: int

    def resized(self, num_blocks: int, max_model_len: int) -> KVCachePlan:
        """The same with other numbers: those that all stages have agreed on."""
        num_bytes = self.num_bytes // self.num_blocks * num_blocks
        return KVCachePlan(num_blocks, self.block_size, num_bytes, max_model_len)


def available_memory() -> int:
    """Bytes that a new process may use without swapping: what the kernel says, or the control group's rest."""
    available = _DEFAULT_MOST * 4
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (found := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        available = int(found[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def plan_kv_cache(
    config: CacheConfig, *, bytes_per_token: int, model_len: int, max_model_len: int | None, available: int
) -> KVCachePlan:
    """Divide the memory into blocks.

    Args:
        bytes_per_token: of keys and values, over all layers of this worker.
        model_len: the context that the model was made for.
        max_model_len: the user's, or None: the model's, or less where the cache is smaller.
        available: free memory in bytes, for the default size.

    Raises ConfigError where `max_model_len` is over the model's context, or does not fit into the cache.
    """
    if max_model_len is not None and max_model_len > model_len:
        raise ConfigError(f"--max-model-len is {max_model_len}: this model's context holds {model_len} tokens")
    memory = int(min(available * _DEFAULT_SHARE, _DEFAULT_MOST))
    if config.kv_cache_memory is not None:
        memory = int(config.kv_cache_memory * GIB)
        if memory > available:
            raise ConfigError(
                f"--kv-cache-memory is {config.kv_cache_memory} GiB: {available / GIB:.1f} GiB of memory are available"
            )
    bytes_per_block = bytes_per_token * config.block_size
    num_blocks = memory // bytes_per_block
    capacity = num_blocks * config.block_size
    wanted = max_model_len or min(model_len, capacity)
    if wanted > capacity or capacity < 2:
        need = -(-(max_model_len or 2) // config.block_size) * bytes_per_block / GIB
        raise ConfigError(
            f"The KV cache of {memory / GIB:.3f} GiB holds {capacity} tokens: fewer than --max-model-len "
            f"({max_model_len or 2}). Set --kv-cache-memory to {need:.3f} or more, "
            f"or --max-model-len to {capacity} or less"
        )
    return KVCachePlan(num_blocks, config.block_size, num_blocks * bytes_per_block, wanted)
