"""The publishing ranks' own gloo group: what they tell each other, and the bytes that they hash for each other."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from services.wire.errors import UsageError
from weight_bus.errors import TransportError

_Result = TypeVar("_Result")


class Ranks:
    """Gloo group of the publishing ranks. Made, used and closed by all alike.

    It is the publisher's own: its calls run on background threads and never come between the trainer's collectives.
    Raises UsageError where torch.distributed is not initialised. `wait_s` bounds every exchange.
    """

    def __init__(self, wait_s: float = 60.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError("weights are published by several ranks, and no process group is initialised", "torchrun")
        self._wait_s = wait_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def exchange(self, part: bytes) -> list[bytes]:
        """Everyone's bytes, by rank. Raises TransportError when a rank is gone or does not come within `wait_s`."""
        return self._bounded(lambda: self._exchange(part))

    def pass_on(self, sent: list[tuple[int, torch.Tensor]], expected: list[tuple[int, torch.Tensor]]) -> None:
        """Send each `(rank, bytes)` of `sent`, and fill those of `expected`, in the order that their ranks send them.

        All ranks call it alike. uint8 tensors `[n]` of host memory. Raises as `exchange` does.
        """
        self._bounded(lambda: self._pass_on(sent, expected))

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _bounded(self, work: Callable[[], _Result]) -> _Result:
        try:
            return work()
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} got no answer from the other publishing ranks within {self._wait_s:g} s ({error})"
            ) from error

    def _pass_on(self, sent: list[tuple[int, torch.Tensor]], expected: list[tuple[int, torch.Tensor]]) -> None:
        under_way = [dist.irecv(data, rank, group=self._group) for rank, data in expected]
        under_way += [dist.isend(data, rank, group=self._group) for rank, data in sent]
        for work in under_way:
            if work is not None:
                work.wait()

    def _exchange(self, part: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(part)]), group=self._group)
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        return [bytes(found[: int(size)].numpy()) for found, size in zip(parts, sizes, strict=True)]
