"""Devices for the trainer's ranks and for engines: no device twice, what each takes at most 0.92 of it. Pure.

    trainer   4 ranks ──► 0 1 2 3           in order of ranks: those that talk most are neighbours
    engines   of 2    ──►         4 5 │ 6 7   each on one machine, on one NUMA node where there is room

Where there is one device alone, trainer and engines may share it: `shared`. Each then has a share of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.host.devices import Device
from services.policies.training.memory import Estimate

MOST = 0.92
"""Of a device's memory, as vLLM takes by itself: the rest is for what nobody counts."""
_GIB = 1 << 30


class PlacementError(ValueError):
    """What cannot be placed, with the sum."""


@dataclass(frozen=True)
class Wanted:
    """A process that wants `devices` of them, with `takes` on each. `together`: all on one machine."""

    name: str
    devices: int
    takes: Estimate
    together: bool = True


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process stands. `nbytes` it takes of each device, `words`: the sum. `share` of the device that it may take,
    None: all of it."""

    name: str
    devices: list[Device]
    nbytes: int
    words: str
    share: float | None = None

    @property
    def host(self) -> int:
        return self.devices[0].host if self.devices else 0


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Every process that wants devices, the trainer first; `unused` ones."""

    places: list[Place] = []
    unused: list[Device] = []

    def of(self, name: str) -> Place | None:
        """Where the process of this name stands; None where it has no devices."""
        return next((place for place in self.places if place.name == name), None)


def place(trainer: Wanted | None, engines: Sequence[Wanted], devices: Sequence[Device], *, shared: bool) -> Placement:
    """Raises PlacementError, with the sum, where they cannot all be placed. `shared`: on one device, all of them."""
    wanted = [*([] if trainer is None else [trainer]), *engines]
    if shared:
        return _on_one(trainer, engines, devices)
    for each in wanted:
        _refuse_too_large(each, devices)
    asked = sum(each.devices for each in wanted)
    if asked > len(devices):
        raise PlacementError(f"{_sum(wanted)} = {asked} GPUs, and there are {len(devices)}")
    for trainer_first in (True, False):
        free, places = list(devices), dict[str, Place]()
        order = wanted if trainer_first or trainer is None else [*engines, trainer]
        for each in order:
            found = _some(each, free)
            if found is None:
                break
            free = [device for device in free if device not in found]
            places[each.name] = _placed(each, found)
        else:
            return Placement(places=[places[each.name] for each in wanted], unused=free)
    raise PlacementError(
        f"{_sum(wanted)}: no machine has devices enough for each of them beside the others ({_machines(devices)})"
    )


def fits(takes: Estimate, device: Device) -> bool:
    return takes.total <= MOST * device.nbytes


def _on_one(trainer: Wanted | None, engines: Sequence[Wanted], devices: Sequence[Device]) -> Placement:
    """Everything on the first device. The engines share what the trainer leaves."""
    wanted = [*([] if trainer is None else [trainer]), *engines]
    several = next((each for each in wanted if each.devices > 1), None)
    if several is not None or not devices:
        what = "there is none" if several is None else f"{several.name} wants {several.devices}"
        raise PlacementError(f"one GPU cannot be shared: {what}")
    device = devices[0]
    total = sum(each.takes.total for each in wanted)
    room = MOST * device.nbytes
    if total > room:
        parts = "; ".join(f"{each.name} {each.takes.total / _GIB:.1f} ({each.takes.words})" for each in wanted)
        raise PlacementError(
            f"{total / _GIB:.1f} GiB are more than {MOST:g} of {device.nbytes / _GIB:.1f} on one shared GPU: {parts}"
        )
    left = room - (0 if trainer is None else trainer.takes.total)
    share = round(left / device.nbytes / max(1, len(engines)) - 0.0005, 3)
    places = [_placed(each, [device], None if each is trainer else share) for each in wanted]
    return Placement(places=places, unused=list(devices[1:]))


def _placed(wanted: Wanted, devices: Sequence[Device], share: float | None = None) -> Place:
    takes = wanted.takes
    return Place(name=wanted.name, devices=list(devices), nbytes=takes.total, words=takes.words, share=share)


def _some(wanted: Wanted, free: Sequence[Device]) -> list[Device] | None:
    """The first that are large enough; of one machine, and of one NUMA node, where there are as many."""
    large = [device for device in free if fits(wanted.takes, device)]
    by_host: dict[int, list[Device]] = {}
    by_node: dict[tuple[int, int | None], list[Device]] = {}
    for device in large:
        by_host.setdefault(device.host, []).append(device)
        by_node.setdefault((device.host, device.numa), []).append(device)
    for group in (*by_node.values(), *by_host.values(), *([] if wanted.together else [large])):
        if len(group) >= wanted.devices:
            return group[: wanted.devices]
    return None


def _refuse_too_large(wanted: Wanted, devices: Sequence[Device]) -> None:
    largest = max((device.nbytes for device in devices), default=0)
    if wanted.devices and wanted.takes.total > MOST * largest:
        raise PlacementError(
            f"{wanted.name} takes {wanted.takes.total / _GIB:.1f} GiB of a GPU, more than {MOST:g} of "
            f"{largest / _GIB:.1f} ({wanted.takes.words})"
        )


def _sum(wanted: Sequence[Wanted]) -> str:
    """`trainer 4 + 2 engines of 2`."""
    counted: dict[int, int] = {}
    words = []
    for each in wanted:
        if each.together:
            counted[each.devices] = counted.get(each.devices, 0) + 1
        else:
            words.append(f"{each.name} {each.devices}")
    words += [f"{count} engine{'s' if count > 1 else ''} of {devices}" for devices, count in counted.items()]
    return " + ".join(words)


def _machines(devices: Sequence[Device]) -> str:
    hosts: dict[int, int] = {}
    for device in devices:
        hosts[device.host] = hosts.get(device.host, 0) + 1
    return ", ".join(f"machine {host}: {count}" for host, count in sorted(hosts.items()))
