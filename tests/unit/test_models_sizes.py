"""What a stage weighs is what lies in memory once it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millstream.check import check
from millstream.config import CacheConfig, EngineConfig, ModelConfig
from millstream.hub.files import resolve
from millstream.kernels.native import NativeOps, native_available, native_unavailable_reason
from millstream.models.arch import ModelArch
from millstream.models.decoder import Decoder
from millstream.models.load import load_decoder
from millstream.models.sizes import model_bytes, stage_bytes
from millstream.parallel.stage import stages_of
from tests.models_helpers import default_gguf  # noqa: F401
from tests.pipeline_helpers import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def tensors(found: object) -> Iterator[torch.Tensor]:
    """All that an object of ours holds, however deep."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        for value in found.values():
            yield from tensors(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from tensors(value)
    elif type(found).__module__.startswith(("millstream.layers", "millstream.models", "millstream.kernels.native")):
        yield from tensors({k: v for k, v in getattr(found, "__dict__", {}).items() if k not in ("_ops", "slots")})


def resident_bytes(decoder: Decoder) -> int:
    rotary = decoder._cos_sin_PE.data_ptr()
    weights = {t.data_ptr(): t.nbytes for t in tensors(decoder) if t.data_ptr() != rotary}
    return sum(weights.values())


@pytest.mark.skipif(not native_available(), reason=native_unavailable_reason())
@pytest.mark.parametrize("split", [(4,), (1, 3), (2, 1, 1)])
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_stage_bytes_are_what_is_resident(
    model: Path, split: tuple[int, ...], dtype: str, quantization: str | None
) -> None:
    files = resolve(str(model))
    arch = ModelArch.from_files(files)
    for stage in stages_of(split):
        ops = NativeOps(dtype=dtype, threads=1, quantization=quantization)
        decoder = load_decoder(files, arch, ops, dtype=dtype, stage=stage)
        assert stage_bytes(arch, stage, dtype, quantization=quantization) == resident_bytes(decoder)


def test_the_default_model(default_gguf: Path) -> None:  # noqa: F811
    arch = ModelArch.from_files(resolve("smollm2"))
    stages = stages_of((30,))
    table, matrices = 49152 * 576, 30 * 576 * (960 + 576 + 3 * 1536)
    norms = 61 * 576
    assert model_bytes(arch, stages, "bfloat16") == 2 * (2 * table + matrices + norms)
    int8 = (table + matrices) * 34 // 32 + 2 * (table + norms)
    assert model_bytes(arch, stages, "bfloat16", quantization="int8") == int8


@pytest.mark.parametrize(("quantization", "told"), [(None, "0.30 GiB in bfloat16"), ("int8", "0.19 GiB in int8")])
def test_check_tells_what_is_resident(
    default_gguf: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    quantization: str | None,
    told: str,
) -> None:
    config = EngineConfig(model=ModelConfig(quantization=quantization), cache=CacheConfig(kv_cache_memory=0.25))
    assert check(config) == 0
    assert told in capsys.readouterr().out
