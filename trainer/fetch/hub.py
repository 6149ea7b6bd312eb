"""Models of the Hugging Face Hub, by the library huggingface_hub, in its own cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.host.models import check_code, code_files
from services.wire.errors import RollmeshError, UsageError

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""Configuration, weights, tokenizer, chat template. No code, unless it is asked for."""


def fetch(name: str, say: Callable[[str], None], *, trust_remote_code: bool = False) -> Path:
    """The folder of `owner/name`: from the local cache where it is there whole, else fetched, with progress.

    Raises UsageError for a repository that is unknown or closed to this user, and for one that needs code of its own
    unless `trust_remote_code`; RollmeshError where the Hub cannot be
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

    if (found := cached(name, trust_remote_code=trust_remote_code)) is not None:
        check_code(found, trusted=trust_remote_code)
        return found
    say(f"fetching {name} from the Hugging Face Hub; an interrupted download goes on where it stopped")
    try:
        # First, so that one that is refused costs no download.
        check_code(Path(snapshot_download(name, allow_patterns=["config.json"])), trusted=trust_remote_code)
        folder = Path(snapshot_download(name, allow_patterns=_wanted(trust_remote_code)))
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
    if not _is_whole(folder, trust_remote_code):
        raise UsageError(f"{name} holds no safetensors beside a config.json", "choose another repository")
    return folder


def cached(name: str, *, trust_remote_code: bool = False) -> Path | None:
    """The folder of `owner/name` in the local cache; None where it is not there whole. Nothing is fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_wanted(trust_remote_code), local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if _is_whole(folder, trust_remote_code) else None


def _wanted(trust_remote_code: bool) -> list[str]:
    return [*_FILES, "*.py"] if trust_remote_code else _FILES


def _is_whole(folder: Path, trust_remote_code: bool) -> bool:
    """Whether configuration, all weights and the code that is asked for are there: an interrupted download leaves a folder
    without some of them."""
    if not (folder / "config.json").exists():
        return False
    if trust_remote_code and not all((folder / file).exists() for file in code_files(folder)):
        return False
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return any(folder.glob("*.safetensors"))
    named = msgspec.json.decode(index.read_bytes(), type=dict[str, object]).get("weight_map")
    return isinstance(named, dict) and all((folder / str(file)).exists() for file in set(named.values()))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
