"""Models of the Hugging Face Hub, by the library huggingface_hub, in its own cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.wire.errors import RollmeshError, UsageError

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""Configuration, weights, tokenizer, chat template. No code: nothing of a repository is run."""


def fetch(name: str, say: Callable[[str], None]) -> Path:
    """The folder of `owner/name`: from the local cache where it is there whole, else fetched, with progress.

    Raises UsageError for a repository that is unknown or closed to this user, RollmeshError where the Hub cannot be
    reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if (found := cached(name)) is not None:
        return found
    say(f"fetching {name} from the Hugging Face Hub; an interrupted download goes on where it stopped")
    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES))
    except GatedRepoError as error:
        raise UsageError(
            f"{name} is open to those alone who accepted its terms",
            "accept them on its page, then set HF_TOKEN to a token of yours",
        ) from error
    except RepositoryNotFoundError as error:
        hint = "" if os.environ.get("HF_TOKEN") else ", or set HF_TOKEN where it is private"
        raise UsageError(f"the Hugging Face Hub has no {name}", f"check the name{hint}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise RollmeshError(
            f"{name} is not in the local cache and cannot be fetched ({_first_line(error)})",
            f"`rollmesh models fetch {name}` where the Hub can be reached, or model.path=FOLDER",
        ) from error
    if not _is_whole(folder):
        raise UsageError(f"{name} holds no safetensors beside a config.json", "choose another repository")
    return folder


def cached(name: str) -> Path | None:
    """The folder of `owner/name` in the local cache; None where it is not there whole. Nothing is fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    """Whether configuration and all weights are there: an interrupted download leaves a folder without some of them."""
    if not (folder / "config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return any(folder.glob("*.safetensors"))
    named = msgspec.json.decode(index.read_bytes(), type=dict[str, object]).get("weight_map")
    return isinstance(named, dict) and all((folder / str(file)).exists() for file in set(named.values()))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
