"""`millstream check MODEL`: what serving it would take, from its headers alone; no weights are read."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from millstream.config import EngineConfig
from millstream.errors import ConfigError, MillstreamError
from millstream.hub.files import ModelFiles, resolve
from millstream.models.arch import ModelArch
from millstream.models.sizes import model_bytes
from millstream.parallel.stage import stages_of
from millstream.tokenizer.tokenizer import Tokenizer
from millstream.worker.kv_cache import KVCachePlan, available_memory, plan_kv_cache
from millstream.worker.stage_cost import choose_layer_split

GIB = 2**30
_CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def check(config: EngineConfig) -> int:
    """Print architecture, sizes, KV cache plan and chat template; 0 if it would run, else 1.

    Raises ModelError for a model that isn't there or isn't supported, ConfigError for stages that don't fit it.
    """
    console = Console(highlight=False)
    files = resolve(config.model.model, cache_dir=config.model.cache_dir)
    arch = ModelArch.from_files(files)
    dtype = arch.compute_dtype(config.model.dtype)
    available = available_memory()
    stages = stages_of(choose_layer_split(arch, config.parallel))
    weight_bytes = model_bytes(arch, stages, dtype, quantization=config.model.quantization)
    console.print(_facts(files, arch, dtype, config, weight_bytes, available))
    try:
        plan = plan_kv_cache(
            config.cache,
            bytes_per_token=arch.kv_bytes_per_token(dtype),
            model_len=arch.max_position,
            max_model_len=config.model.max_model_len,
            available=available - weight_bytes,
        )
    except ConfigError as e:
        console.print(f"[red]Would not start:[/red] {e}")
        return 1
    console.print(_plan(plan, arch.kv_bytes_per_token(dtype)))
    return 0


def _facts(
    files: ModelFiles, arch: ModelArch, dtype: str, config: EngineConfig, weight_bytes: int, available: int
) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in (
        ("Model", f"{files.name}  ({files.kind}, {files.path})"),
        ("Architecture", arch.family),
        ("Layers", f"{arch.num_layers} of width {arch.hidden_size}, MLP {arch.intermediate_size}"),
        ("Heads", f"{arch.num_heads} query, {arch.num_kv_heads} key/value, of {arch.head_dim}"),
        ("Vocabulary", f"{arch.vocab_size:,}"),
        ("Context", f"{arch.max_position:,} tokens"),
        ("Parameters", f"{arch.num_parameters() / 1e6:,.1f} M"),
        ("Checkpoint", arch.checkpoint_dtype),
        ("Weights", f"{weight_bytes / GIB:.2f} GiB in {config.model.quantization or dtype}"),
        ("Memory available", f"{available / GIB:.1f} GiB"),
        ("Chat template", _template(files, config)),
        ("Kernels", _kernels(arch, dtype, config)),
    ):
        table.add_row(name, value)
    return table


def _template(files: ModelFiles, config: EngineConfig) -> str:
    if config.model.chat_template:
        return config.model.chat_template
    try:
        found = Tokenizer.load(files).chat_template is not None
    except MillstreamError as e:
        return f"no tokenizer: {e}"
    return "found" if found else "none: chat would need --chat-template FILE; completions work"


def _kernels(arch: ModelArch, dtype: str, config: EngineConfig) -> str:
    # brings torch, which nothing else here needs
    from millstream.kernels.native import native_level, native_obstacle

    obstacle = native_obstacle(dtype=dtype, head_dim=arch.head_dim, block_size=config.cache.block_size)
    return f"torch: {obstacle}" if obstacle else f"native, {native_level()}"


def _plan(plan: KVCachePlan, bytes_per_token: int) -> Table:
    capacity = plan.num_blocks * plan.block_size
    table = Table(
        title=f"KV cache: {plan.num_bytes / GIB:.2f} GiB, {capacity:,} tokens in {plan.num_blocks:,} blocks of "
        f"{plan.block_size} ({bytes_per_token / 1024:.1f} KiB a token)",
        title_justify="left",
    )
    table.add_column("requests at once", justify="right")
    table.add_column("longest each (prompt and answer), tokens", justify="right")
    for count in _CONCURRENCIES:
        longest = min(plan.num_blocks // count * plan.block_size, plan.max_model_len)
        if longest > 0:
            table.add_row(f"{count}", f"{longest:,}")
    return table
