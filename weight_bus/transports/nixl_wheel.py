"""Which build of NIXL is used: the one for the CUDA that torch was built for, where several are installed.

NIXL's wheels differ in the CUDA runtime that their UCX loads. One for another CUDA than torch's cannot register torch's
memory on a GPU; the host's it can, with or without a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path

WHEELS = {12: "nixl_cu12", 13: "nixl_cu13"}
"""CUDA's major version → the module; its package is called likewise, with a hyphen."""
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.", re.MULTILINE)


def choose(installed: Collection[str], cuda: int | None) -> str | None:
    """The module to import of those installed; None where there is none. `cuda`: torch's, None: it has none. Pure."""
    fitting = WHEELS.get(cuda or 0)
    if fitting in installed:
        return fitting
    return next((module for module in WHEELS.values() if module in installed), None)


def package_for(cuda: int | None) -> str:
    """What is to be installed, with its version."""
    return f"{WHEELS.get(cuda or 0, WHEELS[12]).replace('_', '-')}>=1.5,<2"


def cuda_of(version_file: str) -> int | None:
    """The major version in the text of torch's version.py; None for a build without CUDA. Pure."""
    found = _CUDA.search(version_file)
    return None if found is None else int(found[1])


@cache
def cuda_of_torch() -> int | None:
    """Of the torch that is installed, without importing it; None where there is none, or none for CUDA."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        return cuda_of((Path(found.origin).parent / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return None


def nixl_module() -> str | None:
    """The module of NIXL that this process uses, without importing it; None where none is installed."""
    return choose([module for module in WHEELS.values() if find_spec(module) is not None], cuda_of_torch())
