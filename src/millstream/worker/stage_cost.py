"""How layers are shared out so that stages take equally long. Imports no torch."""

from __future__ import annotations

from millstream.config import ParallelConfig
from millstream.errors import ConfigError
from millstream.models.arch import ModelArch
from millstream.models.sizes import layer_parameters
from millstream.parallel.stage import balanced_sizes

_KNEE_ROWS = 16
"""Rows at which multiplying by a weight takes as long as reading it."""
_STEP_TOKENS, _STEP_SAMPLED = 256, 8
"""The step that is balanced: a chunk of a long prompt with a few decodes, as pipelines are made for. A weight takes
the time to read it and to multiply it by its rows, which for the head are only those that are sampled."""


def head_cost(arch: ModelArch) -> float:
    """The head's estimated time in a typical step, in layers."""
    head = arch.vocab_size * arch.hidden_size * (1 + _STEP_SAMPLED / _KNEE_ROWS)
    return head / (layer_parameters(arch) * (1 + _STEP_TOKENS / _KNEE_ROWS))


def choose_layer_split(arch: ModelArch, config: ParallelConfig) -> tuple[int, ...]:
    """Layers of each stage: those set by hand, or balanced ones. Raises ConfigError where they don't fit the model."""
    num_layers, num_stages = arch.num_layers, config.pipeline_parallel_size
    if num_stages > num_layers:
        raise ConfigError(f"--pipeline-parallel-size is {num_stages}: this model has {num_layers} layers")
    if config.layer_split is None:
        return tuple(balanced_sizes(num_layers, num_stages, head_cost=head_cost(arch)))
    if sum(config.layer_split) != num_layers:
        raise ConfigError(
            f"--pipeline-layer-split is {config.pipeline_layer_split}, {sum(config.layer_split)} layers: "
            f"this model has {num_layers}"
        )
    return config.layer_split
