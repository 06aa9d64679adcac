"""How the KV cache's memory becomes blocks, and what is refused."""

from __future__ import annotations

import pytest

from millstream.config import CacheConfig
from millstream.errors import ConfigError
from millstream.worker.kv_cache import GIB, plan_kv_cache

BYTES = 23040


def test_memory_is_divided_into_blocks() -> None:
    plan = plan_kv_cache(
        CacheConfig(kv_cache_memory=1.0), bytes_per_token=BYTES, model_len=8192, max_model_len=None, available=8 * GIB
    )
    assert plan.num_blocks == GIB // (BYTES * 32) == 1456
    assert plan.num_bytes == 1456 * 32 * BYTES
    assert plan.max_model_len == 8192


def test_default_is_a_quarter_of_what_is_free_and_at_most_4_gib() -> None:
    def num_bytes(available: int) -> int:
        return plan_kv_cache(
            CacheConfig(), bytes_per_token=BYTES, model_len=8192, max_model_len=None, available=available
        ).num_bytes

    assert num_bytes(8 * GIB) == 2 * GIB // (BYTES * 32) * BYTES * 32
    assert num_bytes(64 * GIB) == 4 * GIB // (BYTES * 32) * BYTES * 32


def test_the_context_shrinks_to_a_small_cache_unless_it_was_asked_for() -> None:
    config = CacheConfig(kv_cache_memory=0.01)
    plan = plan_kv_cache(config, bytes_per_token=BYTES, model_len=8192, max_model_len=None, available=GIB)
    assert plan.max_model_len == 14 * 32
    with pytest.raises(ConfigError, match=r"holds 448 tokens.*--kv-cache-memory to 0\.0\d+.*--max-model-len to 448"):
        plan_kv_cache(config, bytes_per_token=BYTES, model_len=8192, max_model_len=449, available=GIB)


def test_what_the_machine_or_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory is 2\.0 GiB: 1\.0 GiB of memory are available"):
        plan_kv_cache(
            CacheConfig(kv_cache_memory=2.0), bytes_per_token=BYTES, model_len=64, max_model_len=None, available=GIB
        )
    with pytest.raises(ConfigError, match="--max-model-len is 65: this model's context holds 64 tokens"):
        plan_kv_cache(CacheConfig(), bytes_per_token=BYTES, model_len=64, max_model_len=65, available=GIB)
