"""Context parallelism: the tokens of a packed row on several ranks, its attention by heads (Ulysses, Jacobs et al. 2023,
arXiv:2309.14509).

    rank 0   tokens 0 … 3, all heads ──┐ all-to-all ┌── all tokens, heads 0, 1 ── attention ──┐ all-to-all ┌── tokens 0 … 3
    rank 1   tokens 4 … 6, all heads ──┘            └── all tokens, heads 2, 3 ── attention ──┘            └── tokens 4 … 6

Everything but attention is computed where the token is. Every rank knows the whole row, so attention, shared stems and
windows included, is what one process computes, of fewer heads.

What is said of sampled tokens is gathered on every rank, a number a token, and each computes the whole loss from it. Its
gradient goes back to the rank that the token is on: gradients of weights are parts, and their **sum** over the ranks is
that of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from services.wire.errors import UsageError


@dataclass(frozen=True)
class ContextSlice:
    """The tokens of a packed row that this rank computes: `begin … end − 1` of `total`. `sizes`: how many each rank does;
    they differ by one at most. `rank`: this one's, in `group`.

    No rank computes nothing, which models and collectives do not take: of fewer tokens than ranks, those without one
    compute the first token too, which nobody sees.
    """

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...]
    total: int

    @property
    def begin(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def end(self) -> int:
        return self.begin + self.sizes[self.rank]

    def to_heads(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[t, H, D]` of this rank's tokens, and `[t, H_kv, D]` twice: of all tokens, this rank's heads `[T, H / n, D]` and
        as many of the keys' and values' as they need. Keys that several ranks need are sent to each.

        Raises UsageError where `H` does not divide.
        """
        ranks, heads = len(self.sizes), queries.shape[1]
        check_heads(heads, ranks)
        # Query heads of one group stay beside each other: n / gcd(H_kv, n) copies of each, of which a rank gets its own.
        copies = lcm(keys.shape[1], ranks) // keys.shape[1]
        if copies > 1:
            keys, values = (each.repeat_interleave(copies, dim=1) for each in (keys, values))
        parts = [each.reshape(len(each), ranks, -1) for each in (queries, keys, values)]
        widths = [part.shape[-1] for part in parts]
        own: Tensor = _Exchange.apply(torch.cat(parts, dim=-1), self, True)  # type: ignore[no-untyped-call]
        if self.total < ranks:
            own = own[: self.total]
        found = own.split_with_sizes(widths, dim=-1)
        first, second, third = (
            part.view(self.total, -1, each.shape[-1]) for part, each in zip(found, (queries, keys, values), strict=True)
        )
        return first, second, third

    def to_tokens(self, attended: Tensor) -> Tensor:
        """Back: `[T, H / n, D]` of this rank's heads, `[t, H, D]` of its tokens."""
        every = attended.flatten(1)
        if self.total < len(self.sizes):
            every = functional.pad(every, (0, 0, 0, len(self.sizes) - self.total))
        own: Tensor = _Exchange.apply(every, self, False)  # type: ignore[no-untyped-call]
        return own.view(len(own), -1, attended.shape[-1])

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """`[H]`: what stands there for this rank's heads, `[H / n]`."""
        ranks = len(self.sizes)
        check_heads(len(of_heads), ranks)
        return of_heads.view(ranks, -1)[self.rank]

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's of `tokens`, `[1, T]`."""
        return tokens[:, self.begin : self.end] if self.begin < self.total else tokens[:, :1]

    def own_places(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Which of `places`, int64 `[N]`, are of this rank's tokens, int64 `[N']`; and where among them, int64 `[N']`."""
        mine = ((places >= self.begin) & (places < min(self.end, self.total))).nonzero().squeeze(-1)
        return mine, places[mine] - self.begin

    def every(self, own: Tensor) -> Tensor:
        """What this rank computed of its tokens, `[t, …]`: of all of them, `[T, …]`; as `gathered`."""
        count = max(0, min(self.end, self.total) - self.begin)
        mine = torch.arange(self.begin, self.begin + count, device=own.device)
        return self.gathered(own[:count], mine, self.total)

    def gathered(self, own: Tensor, mine: Tensor, count: int) -> Tensor:
        """What this rank found for those that `mine` names of `count`, `[N', …]`: what all ranks did, `[N, …]`.

        Whatever is computed from it is to be computed on every rank alike: the gradient is cut, not summed.
        """
        whole: Tensor = _Gather.apply(own, mine, count, self.group)  # type: ignore[no-untyped-call]
        return whole


def slice_of(mesh: DeviceMesh, total: int) -> ContextSlice:
    """This rank's part of `total` tokens, on a mesh of one dimension."""
    ranks = mesh.size()
    least, more = divmod(max(total, ranks), ranks)
    sizes = tuple(least + (rank < more) for rank in range(ranks))
    return ContextSlice(mesh.get_group(), mesh.get_local_rank(), sizes, total)


def check_heads(heads: int, ranks: int) -> None:
    """Raise UsageError unless `heads`, those of the model or of one of its tensor ranks, divide among `ranks`."""
    if heads % ranks:
        raise UsageError(
            f"{heads} attention heads cannot be divided among {ranks} context ranks",
            f"set trainer.parallel.context to a divisor of {heads}",
        )


class _Exchange(torch.autograd.Function):
    """To heads: `[t, n, F]`, a part for each rank, becomes `[T, F]`, this rank's part of all tokens. Back: `[T, F]` becomes
    `[t, n, F]`. Each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, part: ContextSlice, to_heads: bool) -> Tensor:
        ctx.part, ctx.to_heads = part, to_heads
        return _exchange(sent, part, to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradients[0], ctx.part, not ctx.to_heads), None, None


def _exchange(sent: Tensor, part: ContextSlice, to_heads: bool) -> Tensor:
    ranks, own, every = len(part.sizes), [part.sizes[part.rank]] * len(part.sizes), [*part.sizes]
    width = sent.shape[-1]
    if to_heads:
        received = sent.new_empty((sum(every), width))
        dist.all_to_all_single(received, sent.transpose(0, 1).reshape(-1, width), every, own, group=part.group)
        return received
    received = sent.new_empty((ranks, own[0], width))
    dist.all_to_all_single(received.view(-1, width), sent.contiguous(), own, every, group=part.group)
    return received.transpose(0, 1).contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, mine: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine)
        # Every row is 0 on all ranks but one: the sum is exact, and needs no host to know how many each rank has.
        whole = own.new_zeros((count, *own.shape[1:])).index_copy_(0, mine, own)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        return gradients[0].index_select(0, mine), None, None, None
