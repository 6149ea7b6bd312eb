"""How many ranks, engines and GPUs an engine, for a model and the GPUs that there are. Pure.

trainer   as few data ranks as fit with the settings, or with what `memory_fit` may change
engine    as few GPUs as fit
the rest  is for more engines: generating takes longer than training
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.host.devices import Device
from services.policies.placement.engine_memory import EngineOptions, engine_estimate
from services.policies.placement.place import MOST, Placement, PlacementError, Wanted, place
from services.policies.training.memory import MemoryOptions
from services.policies.training.memory_fit import Fitted, fit, smallest
from services.policies.training.model_shape import ModelShape

_GIB = 1 << 30


@dataclass(frozen=True)
class Proposal:
    """`trainer`: its options; `ranks` of an engine, `engines` of them."""

    trainer: Fitted
    ranks: int
    engines: int
    placement: Placement


def propose(shape: ModelShape, trainer: MemoryOptions, engine: EngineOptions, devices: Sequence[Device]) -> Proposal:
    """Raises PlacementError, with the sum, where nothing fits."""
    smallest_device = min((device.nbytes for device in devices), default=0)
    room = MOST * smallest_device
    per_host = max((sum(1 for other in devices if other.host == device.host) for device in devices), default=0)
    ranks = next(
        (
            count
            for count in _powers(min(per_host, shape.kv_heads))
            if engine_estimate(shape, replace(engine, ranks=count)).total <= room
        ),
        None,
    )
    if ranks is None:
        most = max(_powers(min(max(1, per_host), shape.kv_heads)))
        least = engine_estimate(shape, replace(engine, ranks=most))
        raise PlacementError(
            f"an engine on {_gpus(most)} takes {least.total / _GIB:.1f} GiB of each, more than {MOST:g} of "
            f"{smallest_device / _GIB:.1f} ({least.words})"
        )
    takes = engine_estimate(shape, replace(engine, ranks=ranks))
    tried: PlacementError | None = None
    # Offloading the optimizer's state takes time in every step: more ranks come before it.
    for offloads, count in [(offloads, count) for offloads in (False, True) for count in _powers(len(devices))]:
        # One device is shared.
        left = room - (takes.total if len(devices) == 1 else 0)
        found = fit(shape, replace(trainer, layout=replace(trainer.layout, data=count)), left)
        if found is None or (found.options.optimizer_offload and not (offloads or trainer.optimizer_offload)):
            continue
        wanted = Wanted("trainer", found.options.layout.ranks, found.estimate, together=False)
        engines = (len(devices) - wanted.devices) // ranks
        while engines:
            names = [Wanted(f"rollout-server-{number}", ranks, takes) for number in range(engines)]
            try:
                return Proposal(found, ranks, engines, place(wanted, names, devices, shared=False))
            except PlacementError as error:
                tried, engines = error, engines - 1
        if len(devices) == 1:
            one = Wanted("rollout-server-0", ranks, takes)
            return Proposal(found, ranks, 1, place(wanted, [one], devices, shared=True))
    if tried is not None:
        raise tried
    most = max(_powers(max(1, len(devices))))
    least = smallest(shape, replace(trainer, layout=replace(trainer.layout, data=most))).estimate
    raise PlacementError(
        f"no number of {_gpus(len(devices))} holds the trainer and leaves {ranks} to an engine: on {most} the trainer "
        f"takes {least.total / _GIB:.1f} GiB of each ({least.words}), an engine {takes.total / _GIB:.1f}, of "
        f"{MOST:g} · {smallest_device / _GIB:.1f}"
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length()) if 1 << power <= max(1, most)]
