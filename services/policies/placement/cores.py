"""NUMA nodes for processes that have no device: each keeps to one, where its threads find room there. Pure.

On a machine of one node nobody is bound: the system's scheduler knows more. A process beside its GPUs keeps to the cores
near them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.policies.placement.place import Place


def nodes_for(threads: Mapping[str, int], nodes: Sequence[Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Process → its cores. `threads`: of each that computes; `nodes`: cores of each.

    The largest first, each to the node with most room left. Nobody is bound where one finds none: it would wait for the
    others' cores while its own were idle.
    """
    if len(nodes) < 2:
        return {}
    left = [len(node) for node in nodes]
    found: dict[str, tuple[int, ...]] = {}
    for name, count in sorted(threads.items(), key=lambda item: -item[1]):
        node = max(range(len(nodes)), key=lambda number: left[number])
        if left[node] < count:
            return {}
        left[node] -= count
        found[name] = tuple(nodes[node])
    return found


def near(place: Place, usable: Sequence[int], *, by_device: bool) -> list[tuple[int, ...]]:
    """Cores near a process's devices: of each in order (`by_device`, for ranks), or one list for all of them.

    Empty where they are all that may be used, or where nobody knows them: then nothing is bound.
    """
    allowed = frozenset(usable)
    known = [tuple(core for core in device.cores if core in allowed) for device in place.devices]
    if not known or not all(known):
        return []
    if not by_device:
        known = [tuple(sorted({core for cores in known for core in cores}))]
    return [] if all(set(cores) == allowed for cores in known) else known
