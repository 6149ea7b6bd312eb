"""Which bytes of tensors are alive while torch works: each storage that an operation makes, from its birth to its death.

    operation ──► its outputs' storages ──► Event(+ bytes) … Event(− bytes)      a storage dies with its last tensor

It counts what tensors hold, so it works on fake tensors, which have sizes and no memory. What a kernel takes for itself
while it runs is not seen. Storages that are resized in place (weights that FSDP2 gathers) are looked at before each
operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class Event:
    """`nbytes` more, or fewer, of `storage` (a number of its own), while `where` was going on."""

    storage: int
    nbytes: int
    where: str


@dataclass(slots=True)
class _Known:
    number: int
    nbytes: int
    storage: weakref.ref[torch.UntypedStorage]


_OF_COLLECTIVES = ("fsdp", "c10d", "_c10d_functional")


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it operations are watched. `where`: what is going on; whoever knows it sets it. `events`: in their order.

    `answer`: what is read from a fake tensor, which holds no number (`tensor.item()`). None: that is an error, as ever.
    `reads` has other integers told.
    `found`: which part of a fake mask's places is taken for set (`mask.nonzero()`).

    Autograd adds a second gradient of a tensor to the first in place, but not where a mode such as this one is on.
    `summed`: shapes of weights with several gradients (tied ones), whose sums are taken as in place.
    """

    def __init__(self, answer: float | None = None, found: float = 1.0, summed: Collection[torch.Size] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = ""
        self.events: list[Event] = []
        self.summed = summed
        self._answer, self._found = answer, found
        self._integers: Iterator[int] | None = None
        self._numbers = 0
        self._known: dict[int, _Known] = {}
        """By the address of torch's own object, while it lives."""
        self._open: dict[int, _Known] = {}
        self._shut: dict[int, _Known] = {}
        """What FSDP2 resizes in place: with bytes, and without."""
        self.gathered: set[int] = set()
        """Numbers of storages that ranks collect into, or give out from."""

    def add(self, tensors: Iterable[Tensor]) -> list[int]:
        """Count these, which are there already. Returns the numbers of their storages."""
        return [self._see(tensor) for tensor in tensors]

    def reads(self, integers: Sequence[int] | None) -> None:
        """From now on these are read of fake tensors of integers, in turn; None: what `answer` says."""
        self._integers = None if integers is None else cycle(integers)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # It calls operations on its local part, which come here by themselves.
            return NotImplemented
        given = kwargs or {}
        if self._answer is not None and func is torch.ops.aten._local_scalar_dense.default:
            if self._integers is not None and args[0].dtype == torch.int64:
                return next(self._integers)
            return _as_number(self._answer, args[0].dtype)
        if func is torch.ops.aten.nonzero.default and isinstance(args[0], FakeTensor):
            # Of several dimensions it is torch's, of where this rank stands in a mesh.
            count = ceil(self._found * len(args[0])) if args[0].ndim == 1 else 1
            set_places = args[0].new_empty((count, args[0].ndim), dtype=torch.int64)
            self._see(set_places)
            return set_places
        if _of_meta(args, given):
            # Asked for without memory, by somebody who wants to know shapes: not fake ones of this run.
            with unset_fake_temporarily():
                return func(*args, **given)
        if self._adds_up(func, args):
            return args[0]
        self._look_again(self._open)
        collective = func.namespace in _OF_COLLECTIVES
        if collective or func is torch.ops.aten.copy_.default:
            self._look_again(self._shut)
        out = _grouped(*args, **given) if _is_grouped(func, args) else func(*args, **given)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        for leaf in tree_leaves((args, given, out)) if collective else ():
            if isinstance(leaf, Tensor):
                self.gathered.add(self._see(leaf))
                self._watch(leaf)
        if func is torch.ops.aten.copy_.default and args[0].ndim == 1:
            # A group of one rank collects its weights by a copy, into what is resized as after a collective.
            self._watch(args[0])
        return out

    def _adds_up(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether it is autograd that adds gradients of a tied weight, of which only the size is looked at."""
        if not self.summed or func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
            return False
        both = args[:2]
        return all(isinstance(each, FakeTensor) and each.shape in self.summed for each in both)

    def _see(self, tensor: Tensor) -> int:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None:
            return known.number
        self._numbers += 1
        known = _Known(self._numbers, storage.nbytes(), weakref.ref(storage, lambda _: self._gone(key)))
        self._known[key] = known
        self.events.append(Event(known.number, known.nbytes, self.where))
        return known.number

    def _gone(self, key: int) -> None:
        known = self._known.pop(key)
        self._open.pop(key, None)
        self._shut.pop(key, None)
        self.events.append(Event(known.number, -known.nbytes, self.where))

    def _watch(self, tensor: Tensor) -> None:
        self._see(tensor)
        key = tensor.untyped_storage()._cdata
        if key not in self._shut:
            self._open[key] = self._known[key]

    def _look_again(self, those: dict[int, _Known]) -> None:
        for key, known in [*those.items()]:
            storage = known.storage()
            size = known.nbytes if storage is None else storage.nbytes()
            if size == known.nbytes:
                continue
            self.events.append(Event(known.number, size - known.nbytes, self.where))
            known.nbytes = size
            self.gathered.add(known.number)
            del those[key]
            (self._open if size else self._shut)[key] = known


def _is_grouped(func: Any, args: tuple[Any, ...]) -> bool:
    return func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor)


def _grouped(first: Tensor, second: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """What a product of groups of rows (experts' tokens) makes. Torch's own fake one takes 16-bit floats alone, and the
    real one takes float32 too. `first` `[T, K]`, `second` `[E, K, N]`: `[T, N]`; `[K, T]`, `[T, N]`: `[E, K, N]`, E from
    the groups' ends, `offs`."""
    if second.ndim == 3:
        return first.new_empty((first.shape[0], second.shape[2]))
    assert offs is not None
    return first.new_empty((offs.shape[0], first.shape[0], second.shape[1]))


def _as_number(answer: float, dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return bool(int(answer))
    return answer if dtype.is_floating_point else int(answer)


def _of_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call makes or takes tensors without memory that are not fake ones."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    return bool(tensors) and all(not isinstance(each, FakeTensor) and each.device.type == "meta" for each in tensors)
