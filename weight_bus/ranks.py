"""The publishing ranks of one trainer tell each other what each of them owns, as msgspec bytes over a gloo group.

The group is the publisher's own: its calls happen on the publishers' background threads and never come between the
trainer's collectives.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from services.wire.errors import UsageError
from weight_bus.errors import TransportError


class Ranks:
    """All ranks of the default process group. Made, used and closed by all of them alike.

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
        try:
            return self._exchange(part)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} could not hear the other publishing ranks within {self._wait_s:g} s ({error})"
            ) from error

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _exchange(self, part: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(part)]), group=self._group)
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        return [bytes(found[: int(size)].numpy()) for found, size in zip(parts, sizes, strict=True)]
