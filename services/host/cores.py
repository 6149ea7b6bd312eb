"""The cores that a process keeps to: which there are, by NUMA node, and the variable by which a process is told its own.

ROLLMESH_CORES=0-15            this process, and all that it starts
ROLLMESH_CORES=0-15;16-31      of a trainer's ranks, by LOCAL_RANK
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from services.host.devices import cores_of
from services.wire.errors import UsageError

VARIABLE = "ROLLMESH_CORES"
_NODES = Path("/sys/devices/system/node")


def numa_nodes(usable: Iterable[int], folder: Path = _NODES) -> list[tuple[int, ...]]:
    """The usable cores of each NUMA node that has some, in the order of nodes; one node where the system names none."""
    cores = frozenset(usable)
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    nodes = [tuple(core for core in cores_of(file.read_text()) if core in cores) for file in lists]
    return [node for node in nodes if node] or [tuple(sorted(cores))]


def as_text(cores: Iterable[int]) -> str:
    """`0-3,8`, as the kernel writes them."""
    runs: list[list[int]] = []
    for core in sorted(set(cores)):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def keep_to_cores(environ: Mapping[str, str] = os.environ) -> None:
    """Keep this process to the cores that it was told. For its very beginning: threads that run already are not moved.

    Nothing where it was told none, and on systems without affinity. Raises UsageError for cores that it cannot have.
    """
    told = environ.get(VARIABLE)
    if not told or not hasattr(os, "sched_setaffinity"):
        return
    try:
        by_rank = [cores_of(part) for part in told.split(";")]
        os.sched_setaffinity(0, by_rank[int(environ.get("LOCAL_RANK", "0")) % len(by_rank)])
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{VARIABLE}={told} cannot be kept to ({error})", "leave it out, or name cores that this process may use"
        ) from error
