"""Which model is simulated: a built-in shape card, a Hugging Face config.json, or any model that `serve` takes.

A card is a config.json with nothing but the numbers that give the shape.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from millstream.errors import ConfigError, ModelError
from millstream.hub.files import resolve
from millstream.hub.local import read_json
from millstream.models.arch import ModelArch, arch_from_hf


def card_names() -> list[str]:
    folder = resources.files("millstream.sim") / "data" / "models"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def load_card(name: str) -> ModelArch:
    """The shape of a built-in card. Raises ConfigError where there is none of that name."""
    if name not in card_names():
        raise ConfigError(f"--model-card is {name!r}: it must be one of {', '.join(card_names())}")
    text = (resources.files("millstream.sim") / "data" / "models" / f"{name}.json").read_text()
    config: dict[str, Any] = json.loads(text)
    return arch_from_hf(config)


def load_shape(model: str, *, cache_dir: str | None = None) -> ModelArch:
    """The shape of a config.json, of the folder that it lies in, or of a model that `serve` takes.

    Raises ModelError where it can't be read or is not supported.
    """
    path = Path(model)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        if not path.is_file():
            raise ModelError(f"--model {model}: there is no such file")
        return arch_from_hf(read_json(path))
    return ModelArch.from_files(resolve(model, cache_dir=cache_dir))
