"""The simulated device behind the real server: `serve --device sim`.

Everything but the workers is real: HTTP, tokenizer, engine process, scheduler. The model's own files give shape and
tokenizer; steps take their time on the wall's clock and answers are made of a few words, as long as max_tokens says.
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream.config import EngineConfig
from millstream.hub.files import resolve
from millstream.models.arch import ModelArch
from millstream.sim.cost import CostModel
from millstream.sim.executor import SimulatedExecutor, WallClock
from millstream.sim.hardware import load_hardware
from millstream.tokenizer.tokenizer import Tokenizer

_TEXT = " the water turns the wheel and the wheel turns the stone and the stone grinds the corn"


def make_serving_executor(
    config: EngineConfig, *, hardware: str, overrides: Mapping[str, str] | None = None
) -> SimulatedExecutor:
    """The executor that the engine process runs in place of real workers. `hardware` is what `--hardware` takes.

    Raises ConfigError or ModelError.
    """
    files = resolve(config.model.model, cache_dir=config.model.cache_dir)
    arch = ModelArch.from_files(files)
    cost = CostModel(
        arch,
        load_hardware(hardware, overrides),
        dtype=arch.compute_dtype(config.model.dtype),
        parallel=config.parallel,
        quantization=config.model.quantization,
    )
    return SimulatedExecutor(
        cost.plan(config.cache, max_model_len=config.model.max_model_len),
        cost,
        token_ids=Tokenizer.load(files).encode(_TEXT, add_special_tokens=False),
        depth=cost.num_stages,
        clock=WallClock(),
    )
