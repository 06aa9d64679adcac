"""From a model's name to its files."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from millstream.errors import DownloadError, ModelError
from millstream.hub.files import ModelFiles, default_cache_dir, resolve
from millstream.hub.local import ALIASES, HubId


@pytest.fixture
def empty_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """huggingface_hub without a network and with an empty cache; the list records who asked the network."""
    asked: list[str] = []

    def snapshot_download(repo: str, **options: object) -> str:
        raise hub_errors.LocalEntryNotFoundError("nothing here")

    def model_info(repo: str, **options: object) -> object:
        asked.append(repo)
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    return asked


def make_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_folder_with_safetensors(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "config.json", "model.safetensors")
    assert resolve(str(folder)) == ModelFiles("tiny", "safetensors", folder)


def test_gguf_file_and_folder_with_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "Tiny.Q4_1.gguf")
    path = folder / "Tiny.Q4_1.gguf"
    assert resolve(str(path)) == ModelFiles("Tiny.Q4_1", "gguf", path)
    assert resolve(str(folder)) == ModelFiles("m", "gguf", path)


def test_folder_comes_before_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_hub: list[str]) -> None:
    make_folder(tmp_path / "org" / "name", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == ModelFiles("name", "safetensors", Path("org/name"))
    assert empty_hub == []


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "holds no model: looked for config.json with .*safetensors, and for a .gguf file"),
        (("config.json",), "no .*safetensors"),
        (("config.json", "pytorch_model.bin"), "pytorch_model.bin is a pickle"),
        (("a.gguf", "b.gguf"), "2 .gguf files: name one of a.gguf, b.gguf"),
    ],
)
def test_folder_without_model(names: tuple[str, ...], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        resolve(str(make_folder(tmp_path / "odd", *names)))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "config.json", "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-2\.safetensors is named in the index but not there"):
        resolve(str(folder))
    index["weight_map"]["b"] = "../model-1.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="only files in the same folder"):
        resolve(str(folder))


def test_other_file_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, "model.safetensors", "notes.txt")
    with pytest.raises(ModelError, match="give the folder"):
        resolve(str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match=r"not a \.gguf file$"):
        resolve(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("name", ["nothing", "./org/name", "a/b/c", "/no/such.gguf", "models/x.gguf", "x.gguf", "é/x"])
def test_unknown_name_tells_what_was_looked_for(name: str, empty_hub: list[str]) -> None:
    with pytest.raises(ModelError, match=r"alias \(smollm2\), a folder and a file"):
        resolve(name)
    assert empty_hub == []


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_no_name(name: str) -> None:
    with pytest.raises(ModelError, match="not a name"):
        resolve(name)


def test_hub_id_offline(empty_hub: list[str]) -> None:
    with pytest.raises(DownloadError, match=r"org/name can't be fetched.*give the path"):
        resolve("org/name")
    assert empty_hub == ["org/name"]
    with pytest.raises(ModelError, match="millstream pull org/name"):
        resolve("org/name", fetch=False)
    assert empty_hub == ["org/name"]


def test_hub_id_in_local_cache_takes_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_hub: list[str]
) -> None:
    folder = make_folder(tmp_path / "snapshot", "config.json", "model.safetensors", "x-Q4_K_M.gguf")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(folder))
    assert resolve("org/name") == ModelFiles("name", "safetensors", folder)
    assert resolve("org/name:Q4_K_M", fetch=False) == ModelFiles("name", "gguf", folder / "x-Q4_K_M.gguf")
    assert empty_hub == []


def test_alias(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="millstream pull smollm2"):
        resolve("smollm2", cache_dir=str(tmp_path), fetch=False)
    path = ALIASES["smollm2"].path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"short")
    with pytest.raises(ModelError, match="millstream pull smollm2"):
        resolve("smollm2", cache_dir=str(tmp_path), fetch=False)
    with path.open("r+b") as file:
        file.truncate(98_362_432)
    assert resolve("smollm2", cache_dir=str(tmp_path), fetch=False) == ModelFiles("smollm2", "gguf", path)


def test_default_cache_dir() -> None:
    assert default_cache_dir().parts[-2:] == (".cache", "millstream")


def test_hub_id_chooses_one_gguf_file() -> None:
    files = ["README.md", "m-Q4_K.gguf", "m-Q4_K_M.gguf", "sub/m-f16.gguf", "M.Q8_0.gguf", "M2.Q8_0.gguf"]
    assert HubId("o/n", "Q4_K_M").choose(files) == "m-Q4_K_M.gguf"
    assert HubId("o/n", "q4_k").choose(files) == "m-Q4_K.gguf"
    assert HubId("o/n", "m-f16.gguf").choose(files) == "sub/m-f16.gguf"
    with pytest.raises(ModelError, match=r"fits more than one .gguf file of o/n: M.Q8_0.gguf, M2.Q8_0.gguf"):
        HubId("o/n", "Q8_0").choose(files)
    with pytest.raises(ModelError, match=r"fits no .gguf file of o/n: .*m-f16"):
        HubId("o/n", "Q2_K").choose(files)
