"""From what the user calls a model to its files."""

from __future__ import annotations

from pathlib import Path

from millstream.errors import ModelError
from millstream.hub.local import ALIASES, HubId, ModelFiles, default_cache_dir, in_cache, in_file, in_folder

# What fetches is imported where it is called: it brings the progress bars, which files that are here don't need.

__all__ = ["ModelFiles", "default_cache_dir", "resolve"]


def resolve(model: str, *, cache_dir: str | None = None, fetch: bool = True) -> ModelFiles:
    """The files of `model`: an alias (`smollm2`), a folder, a .gguf file or a hub id (`ORG/NAME[:FILE]`).

    An alias comes first (write `./smollm2` for a folder of that name); a folder or file that exists comes before a
    hub id. What is not on this machine is fetched if `fetch` is true. Raises ModelError that tells what was looked
    for, DownloadError when fetching failed.
    """
    alias = ALIASES.get(model)
    if alias is not None:
        home = Path(cache_dir) if cache_dir else default_cache_dir()
        found = in_cache(alias, home)
        if found is not None:
            return found
        if not fetch:
            raise ModelError(f"{model} is not in {home}: fetch it with `millstream pull {model}`")
        from millstream.hub.pull import pull

        return pull(model, cache_dir=cache_dir)
    if not model or "\0" in model:
        raise ModelError(f"the model {model!r} is not a name")
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return in_folder(path)
        if path.exists():
            return in_file(path)
    except OSError as e:
        raise ModelError(f"the model {model!r} can't be read: {e.strerror or e}") from e
    hub_id = HubId.parse(model)
    if hub_id is None:
        raise ModelError(
            f"there is no model {model!r}: looked for an alias ({', '.join(ALIASES)}), a folder and a file; "
            "a hub id has the form ORG/NAME"
        )
    from millstream.hub.pull import pull_hub

    # Without asking the hub first, a start takes no network when all is here.
    try:
        return pull_hub(hub_id, local_only=True)
    except ModelError as e:
        if fetch:
            return pull_hub(hub_id)
        raise ModelError(
            f"there is no model {model!r}: looked for a folder and a file of that name and in the hub's local cache; "
            f"fetch it with `millstream pull {model}`"
        ) from e
