"""How other projects load weights into a paused engine, for `./dev bench weights`: over its live tensors, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch

from benchmarks.weights.arms import PausedWay
from services.wire.errors import UsageError

_DEADLINE = timedelta(seconds=60)
_PACKED_BELOW_BYTES = 1 << 20
_IN_FLIGHT = 4
_LOOPBACK = "127.0.0.1"

Live = Callable[[], Mapping[str, torch.Tensor]]


class InPlace:
    """How other projects load weights into a paused engine: over the live tensors, which `live` returns at that moment.

        file       open a safetensors file, copy each tensor over the live one                (prime-rl)
        gloo       receive each tensor of a broadcast, large ones directly into the live one  (PipelineRL, vLLM)
        prefetch   while decoding: file ─► own memory;  paused: own memory ─► live            (SkyRL)

    Each at its best on one host: the file is in the page cache and never synced to disk, and nothing is copied twice.
    Copies use one thread, as those projects do through the engine's weight loader. Only `prefetch` may run on a second
    thread at the same time.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._group: Any = None
        self._fetched: dict[str, torch.Tensor] = {}

    def join(self, port: int) -> None:
        """Make the gloo group with the publisher. Blocks until it is there."""
        self._group = make_group(port, rank=1)

    def prefetch(self, path: str) -> None:
        """Read the file into memory of this process, the same from version to version."""
        with torch.no_grad():
            for name, tensor in _opened(path):
                if name not in self._fetched:
                    self._fetched[name] = torch.empty_like(tensor)
                self._fetched[name].copy_(tensor)

    def load(self, way: PausedWay, path: str) -> None:
        """Load while nothing decodes. Raises UsageError for gloo without a group."""
        if way == "gloo":
            if self._group is None:
                raise UsageError("no gloo group was joined", "join before loading over gloo")
            broadcast(self._group, self._live())
        elif way == "file":
            self._copy(_opened(path))
        else:
            self._copy(self._fetched.items())

    def _copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        live = self._live()
        with torch.no_grad():
            for name, tensor in tensors:
                live[name].copy_(tensor)


def _opened(path: str) -> Iterable[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        # Mapped, not read: the copy that follows is the only one.
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            yield name, file.get_tensor(name)


def make_group(port: int, rank: int) -> Any:
    """A gloo group of two on loopback; rank 0 serves the store."""
    import torch.distributed as distributed

    dist: Any = distributed  # its stubs know neither stores nor options
    store = dist.TCPStore(_LOOPBACK, port, 2, is_master=rank == 0, timeout=_DEADLINE)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = _DEADLINE
    return dist.ProcessGroupGloo(dist.PrefixStore("rollmesh-bench", store), rank, 2, options)


@torch.no_grad()
def broadcast(group: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """From rank 0 to rank 1, in the order of names: a large tensor as it lies, small ones packed into one bucket."""
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    ordered = [tensors[name] for name in sorted(tensors)]
    small = [tensor for tensor in ordered if tensor.nbytes < _PACKED_BELOW_BYTES]
    packed = torch.cat([tensor.reshape(-1) for tensor in small]) if small else torch.empty(0)
    large = [tensor for tensor in ordered if tensor.nbytes >= _PACKED_BELOW_BYTES]
    works: list[Any] = []
    for tensor in [*([packed] if small else []), *large]:
        works.append(group.broadcast([tensor], options))
        if len(works) == _IN_FLIGHT:
            works.pop(0).wait()
    for work in works:
        work.wait()
    begin = 0
    for tensor in small:
        tensor.copy_(packed[begin : begin + tensor.numel()].view_as(tensor))
        begin += tensor.numel()
