"""The devices and cores of each process of a mesh on this machine, as environment variables.

    settings ─► `rollmesh placement --json`, where there are GPUs ─► Placement ─► CUDA_VISIBLE_DEVICES, ROLLMESH_CORES
                NUMA nodes of the cores, where there are none      ─────────────► ROLLMESH_CORES

The formula of the trainer's memory goes by its algorithm, which is the trainer's to know: it is asked, as a command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from services.config.checks import ranks_asked
from services.config.load import dump_settings
from services.config.settings import RunSettings
from services.host import cores
from services.host.commands import ask
from services.host.devices import ORDER, VISIBLE
from services.host.process import usable_core_numbers
from services.policies.placement.cores import near, nodes_for
from services.policies.placement.place import Placement
from services.wire.errors import UsageError

NOWHERE = Placement()
"""Of a machine without GPUs."""
SERVER = "rollout-server-"
"""Before the number of an engine's process."""
_BESIDE_ENGINE = 2
"""Threads of a rollout server beside its engine's: its event loop, and what stages weights."""
_NO_DEVICES = ("weight-bus", "gateway", "dashboard", "tracking", "demonstrations")
"""What computes nothing on a GPU. Environments and rewards may be anybody's code: they see what the user's shell sees."""


async def find_placement(settings: RunSettings, *, gpu: bool, trainer: bool = True) -> Placement:
    """Where trainer ranks and engines stand; nowhere on a machine without GPUs. `gpu`: whether the driver lists one.

    `trainer`: whether there is one. Raises UsageError, with the sum, for what does not fit.
    """
    stated = settings.placement.devices
    if stated == "cpu" or (stated == "auto" and not gpu):
        return NOWHERE
    command = ("placement", "--json", "--config", "/dev/stdin", *(() if trainer else ("--no-trainer",)))
    said = await ask(command, "devices were not placed", dump_settings(settings).encode())
    found = msgspec.json.decode(said, type=Placement)
    if any(device.host for place in found.places for device in place.devices):
        raise UsageError(
            f"placement.devices={stated} are on several machines, and `rollmesh up` starts processes on one",
            "start the parts on each by Slurm or Kubernetes (docs/clusters.md)",
        )
    return found


def share_of_engines(settings: RunSettings, found: Placement) -> float | None:
    """What vLLM may take of a GPU that it shares with the trainer; None where it has its own, or was told."""
    place = found.of(f"{SERVER}0")
    if place is None or settings.rollout.vllm.gpu_memory_utilization is not None:
        return None
    return place.share


def environments(
    settings: RunSettings, found: Placement, usable: Sequence[int], nodes: Sequence[Sequence[int]]
) -> dict[str, dict[str, str]]:
    """Process → the variables that give it its devices and its cores.

    `usable`: cores of this process; `nodes`: those of each NUMA node. Of settings whose threads are resolved.
    """
    if not found.places:
        threads = _threads(settings)
        return {name: {cores.VARIABLE: cores.as_text(its)} for name, its in nodes_for(threads, nodes).items()}
    given: dict[str, dict[str, str]] = {name: {VISIBLE: ""} for name in _NO_DEVICES}
    for place in found.places:
        visible = {VISIBLE: ",".join(device.name for device in place.devices), ORDER: "PCI_BUS_ID"}
        its = near(place, usable, by_device=place.name == "trainer")
        given[place.name] = visible | ({cores.VARIABLE: ";".join(map(cores.as_text, its))} if its else {})
    if "trainer" in given:
        # The warm start, which is over before the trainer has loaded its weights.
        given["sft"] = given["trainer"]
    return given


def environments_here(settings: RunSettings, found: Placement) -> dict[str, dict[str, str]]:
    """`environments` on the cores that this process may use."""
    usable = usable_core_numbers()
    return environments(settings, found, usable, cores.numa_nodes(usable))


def in_words(found: Placement) -> str:
    """`GPUs: trainer 0,1; rollout-server-0 2`."""
    stands = "; ".join(f"{place.name} {','.join(device.name for device in place.devices)}" for place in found.places)
    unused = ",".join(device.name for device in found.unused)
    return f"GPUs: {stands}{f'; not used: {unused}' if unused else ''}"


def _threads(settings: RunSettings) -> Mapping[str, int]:
    """Of each process that computes with weights."""
    rollout, threads = settings.rollout, settings.trainer.threads
    of_engine = rollout.threads * rollout.tensor_parallel + _BESIDE_ENGINE
    found = {f"{SERVER}{number}": of_engine for number in range(settings.servers)}
    of_rank = 1 if threads == "auto" else threads
    found["trainer"] = ranks_asked(settings.trainer.parallel) * of_rank + 1
    if settings.trainer.teacher.model is not None and settings.trainer.teacher.url is None:
        found["teacher"] = of_engine
    return found
