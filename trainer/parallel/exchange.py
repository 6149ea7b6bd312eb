"""What FSDP2's ranks exchange on CPUs of one machine: through memory that they share, where gloo would use sockets.

    gather     own part ─► its place in the one result, which all read ─ all have written ─► each rank's weights
    reduce     gradients ─► own slot ─ all have written ─► the sum of a rank's part over all slots ─ all have read

What a layer needs is written where the others read it: nothing is copied for the exchange, and no memory is taken and
given back for it, whose pages the system would fill with zeros each time. What is larger (embedding and head) goes through
the slots in pieces. Ranks wait for each other by gloo's barrier, which has a deadline and fails where a rank is gone.

gloo itself reduces a rank's part by reducing everything, and copies that twice more. GPUs exchange by NCCL, as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from services.policies.training.memory import EXCHANGE_BYTES


def share_memory(
    modules: Sequence[FSDPModule],
    group: dist.ProcessGroup,
    shared: Callable[[dist.ProcessGroup, int], Tensor | None],
) -> None:
    """Have `group`, over which the weights of `modules` are sharded, exchange them and their gradients through memory.

    `shared`: gives its ranks so many bytes in common, uint8, or None (`Ranks.shared`): then nothing changes. All ranks of
    the group call this.
    """
    if group.size() == 1:
        return
    # A multiple of what any rank's part of any dtype needs.
    line = 64 * group.size()
    sizes = _sizes(modules, group.size())
    # Layers that are larger go in pieces, which the cores' common cache may hold.
    room = -(-min(EXCHANGE_BYTES, max(sizes)) // line) * line
    # Where all are larger, none is gathered into a result.
    results = 2 if min(sizes) <= room else 0
    memory = shared(group, room * (results + group.size()))
    if memory is None:
        return
    slots = Slots(memory[results * room :].view(group.size(), room), group.rank())
    gather, reduce = SharedGather(memory[: results * room].view(results, room), slots), SharedReduce(slots)
    for module in modules:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)


def _sizes(modules: Sequence[FSDPModule], ranks: int) -> list[int]:
    """Bytes of the whole weights of each of `modules`, as FSDP2 lays them out: each padded to equal parts. One that has
    others of them within it (the model) is not counted, nor what is sharded by itself within one."""
    sizes = []
    for module in modules:
        assert isinstance(module, nn.Module)
        # The first is the module itself.
        within = [inner for inner in module.modules() if isinstance(inner, FSDPModule)][1:]
        if any(inner in modules for inner in within):
            continue
        apart = {id(each) for inner in within for each in inner.parameters()}
        own = [each for each in module.parameters() if id(each) not in apart]
        sizes.append(sum(_padded(each.shape, ranks) * each.dtype.itemsize for each in own))
    return sizes or [1]


def _padded(shape: torch.Size, ranks: int) -> int:
    """Numbers of all parts of a weight, which is cut along its first dimension."""
    return -(-shape[0] // ranks) * ranks * math.prod(shape[1:])


def _same_place(one: Tensor, other: Tensor) -> bool:
    """Whether both begin at one byte; of tensors without memory, too."""
    first, second = (
        (each.untyped_storage()._cdata, each.storage_offset() * each.dtype.itemsize) for each in (one, other)
    )
    return first == second


class Slots:
    """`memory` uint8 `[ranks, room]`: a row for each rank of a group, which it writes, and all read between two meetings.
    `rank`: this one."""

    def __init__(self, memory: Tensor, rank: int) -> None:
        self._memory, self.rank = memory, rank
        self.ranks, self.room = memory.shape

    def of(self, dtype: torch.dtype) -> Tensor:
        """`[ranks, n]`, as many numbers as there is room for."""
        return self._memory.view(dtype)


class SharedGather(AllGather):
    """Gathers into one of two results, in turn, that all ranks have in common.

    FSDP2 copies a result out before it asks for the next one, at the latest. So a rank that was told that the next is
    complete knows that nobody reads the one before it.
    """

    def __init__(self, results: Tensor, slots: Slots) -> None:
        """`results`: uint8 `[2, room]`, or `[0, room]`."""
        self._results, self._slots, self._turn = results, slots, 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = math.prod(int(each) for each in size)
        if not len(self._results) or count * dtype.itemsize > self._results.shape[1]:
            return torch.empty(*size, dtype=dtype, device=device)
        self._turn = 1 - self._turn
        return self._results[self._turn].view(dtype)[:count].view(*size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002 (gloo's are waited for)
    ) -> None:
        """`input_tensor` `[n]`: this rank's part; `output_tensor` `[ranks · n]`: where it is in its place already."""
        slots = self._slots
        if len(self._results) and _same_place(output_tensor, self._results[self._turn]):
            dist.barrier(group)
            return
        parts, written = output_tensor.view(slots.ranks, -1), slots.of(input_tensor.dtype)
        for start in range(0, len(input_tensor), written.shape[1]):
            piece = input_tensor[start : start + written.shape[1]]
            written[slots.rank, : len(piece)] = piece
            dist.barrier(group)
            for rank in range(slots.ranks):
                if rank != slots.rank:
                    parts[rank, start : start + len(piece)] = written[rank, : len(piece)]
            dist.barrier(group)


class SharedReduce(ReduceScatter):
    """Sums in the order of ranks: it repeats byte for byte."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._asked: int | None = None
        """Numbers of what FSDP2 is about to have reduced: it asks for memory for that, and then for the result."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        slots, count = self._slots, math.prod(int(each) for each in size)
        of_result = self._asked is not None and count * slots.ranks == self._asked
        if not of_result:
            self._asked = count
        # A result becomes the gradient, and stays.
        if of_result or count * dtype.itemsize > slots.room:
            return torch.empty(*size, dtype=dtype, device=device)
        return slots.of(dtype)[slots.rank, :count].view(*size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: ARG002 (as above)
    ) -> None:
        """`output_tensor` `[n]`: this rank's part of the sum, or the mean, of all ranks' `input_tensor` `[ranks · n]`."""
        slots, self._asked = self._slots, None
        written = slots.of(input_tensor.dtype)
        if _same_place(input_tensor, written[slots.rank]):
            self._sum(output_tensor, written[:, : len(input_tensor)], group, op)
            return
        parts, most = input_tensor.view(slots.ranks, -1), written.shape[1] // slots.ranks
        for start in range(0, len(output_tensor), most):
            piece = output_tensor[start : start + most]
            used = written[:, : slots.ranks * len(piece)]
            used[slots.rank].view(slots.ranks, -1).copy_(parts[:, start : start + len(piece)])
            self._sum(piece, used, group, op)

    def _sum(
        self, output: Tensor, written: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp | dist.ReduceOp.RedOpType
    ) -> None:
        """`written` `[ranks, ranks · n]`: by who wrote it, and for whom."""
        slots = self._slots
        dist.barrier(group)
        first, *others = written.view(slots.ranks, slots.ranks, -1)[:, slots.rank]
        torch.add(first, others[0], out=output)
        for other in others[1:]:
            output += other
        if op == dist.ReduceOp.AVG:
            output /= slots.ranks
        elif op != dist.ReduceOp.SUM:
            raise ValueError(f"ranks exchange sums and means, no {op}")
        dist.barrier(group)
