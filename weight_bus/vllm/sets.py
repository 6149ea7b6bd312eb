"""Sets of a model's weights beside those that are served, and how a flip uses them: `weights.shadow`.

    on a CPU       spare ◄─ change places ─► served               microseconds: no bytes are moved
    device         spare ── copy ──► served                       on the device: one set more; `before` in the host's memory
    pinned         spare ── copy over the link ──► served         in the host's memory: two sets; nothing more on the device
    sparse         changed words ──► served                       as pinned, but of a version that changed few words only
                                                                  those travel, beforehand

On a device a version is copied over the one that is served, because CUDA graphs have captured addresses. A rollback copies
the version before out of the host's memory, at the link's speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from services.wire.errors import UsageError
from weight_bus.vllm.protocol import SHADOW

ShadowMode = Literal["device", "pinned", "sparse"]
Tensors = dict[str, torch.Tensor]

SPARSE_SHARE = 0.1
"""Bytes of changed words, of those of all weights, that are held on the device; of more, all are copied as for pinned."""
CHUNK_BYTES = 64 << 20
"""That comparing takes at a time, besides what it finds."""
_COMPARED_BYTES = 16
"""For a word of 2 bytes that changed: itself, whether it changed, its place in 8 bytes and in 4."""
LARGE_BYTES = 1 << 20
"""Of a weight: such ones are copied one by one, which on an H100 is a quarter faster than one kernel over all (2.9 against
2.3 TB/s read and written); smaller ones together, because each call costs microseconds."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Held:
    """Bytes beside the weights that are served: `beside`, where those are; `host`, in the host's memory, pinned where there
    is a device. On a CPU the two lie in one memory, and are counted apart all the same."""

    beside: int
    host: int = 0


class Sets(Protocol):
    """`live`: what is served, by the model's own parameter names; `spare`: where the next version is written.

    `keep` is called on a background thread when a version is whole in the spare set, before it can be served. The flips
    belong on the thread that decodes.
    """

    @property
    def live(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def spare(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def held(self) -> Held: ...

    def keep(self) -> None: ...

    def flip(self) -> None:
        """Serve the spare set."""
        ...

    def flip_back(self) -> None:
        """Serve what was served before the last flip; what this gives up can be flipped to again."""
        ...


def shadow_mode(text: str) -> ShadowMode:
    """Raises UsageError for another word."""
    for mode in get_args(ShadowMode):
        if text == mode:
            return mode  # type: ignore[no-any-return]
    raise UsageError(f"{SHADOW}={text}: no such place for an update", f"known: {', '.join(get_args(ShadowMode))}")


def make_sets(parameters: Mapping[str, torch.nn.Parameter], mode: ShadowMode, *, in_place: bool | None = None) -> Sets:
    """`in_place`: whether addresses must stay; left out, where they are on a device."""
    if in_place is None:
        in_place = on_device(parameters)
    if mode == "device":
        return CopiedSets(parameters) if in_place else SwappedSets(parameters)
    return MirroredSets(parameters, sparse=mode == "sparse")


def update_bytes(parameters: Mapping[str, torch.nn.Parameter], mode: ShadowMode) -> int:
    """Bytes that the sets will hold where the weights are, beside those that are served."""
    total = sum(parameter.nbytes for parameter in parameters.values())
    if mode == "device":
        return total
    if not on_device(parameters):
        return 2 * total
    return 0 if mode == "pinned" else int(SPARSE_SHARE * total) + 2 * CHUNK_BYTES


def on_device(parameters: Mapping[str, torch.nn.Parameter]) -> bool:
    return any(parameter.is_cuda for parameter in parameters.values())


class SwappedSets:
    """Two sets that change places."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = list(parameters.values())
        self.live: Tensors = {name: parameter.data for name, parameter in parameters.items()}
        # A copy, not merely memory: rows of padding are in no manifest and must be the same in both.
        self.spare: Tensors = _copies(self.live)

    @property
    def held(self) -> Held:
        return Held(bytes_of(self.spare))

    def keep(self) -> None:
        """What was served is the spare set afterwards."""

    def flip(self) -> None:
        # Decoding waits meanwhile, and the data touched here is not in the caches: do as little as possible.
        for parameter, spare in zip(self._parameters, self.spare.values(), strict=True):
            parameter.data = spare
        self.live, self.spare = self.spare, self.live

    def flip_back(self) -> None:
        self.flip()


class CopiedSets:
    """One set more on the device, and in the host's memory the version before."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.live: Tensors = {name: parameter.data for name, parameter in parameters.items()}
        self.spare: Tensors = _copies(self.live)
        self._before = host_copies(self.live)
        pairs = [(live, self.spare[name]) for name, live in self.live.items()]
        self._large = [pair for pair in pairs if pair[0].nbytes >= LARGE_BYTES]
        self._small = [pair for pair in pairs if pair[0].nbytes < LARGE_BYTES]

    @property
    def held(self) -> Held:
        return Held(bytes_of(self.spare), bytes_of(self._before))

    def keep(self) -> None:
        _copy(self._before, self.live)

    def flip(self) -> None:
        with torch.no_grad():
            for live, spare in self._large:
                live.copy_(spare, non_blocking=True)
            if self._small:
                torch._foreach_copy_([live for live, _ in self._small], [spare for _, spare in self._small])
        _settle(self.live)

    def flip_back(self) -> None:
        _copy(self.live, self._before)


class MirroredSets:
    """Two sets in the host's memory: one has what is served, the other is the spare one. They change places at a flip.

    `chunk_bytes`: what is compared at a time.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], *, sparse: bool, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.live: Tensors = {name: parameter.data for name, parameter in parameters.items()}
        self.spare: Tensors = host_copies(self.live)
        self._mirror = host_copies(self.live)
        self._sparse, self._chunk_bytes = sparse, chunk_bytes
        self._changes: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None
        """Name → places and values of its changed words, on the device. None: all is copied."""
        self.changed_bytes = 0
        """Of the last version that was committed by its changed words."""

    @property
    def held(self) -> Held:
        changes = [tensor for pair in (self._changes or {}).values() for tensor in pair]
        return Held(sum(tensor.nbytes for tensor in changes), bytes_of(self.spare) + bytes_of(self._mirror))

    def keep(self) -> None:
        self._changes = None
        if self._sparse:
            with beside(self.live):
                self._changes = self._find_changes()

    def flip(self) -> None:
        changes, self._changes = self._changes, None
        if changes is None:
            _copy(self.live, self.spare)
        else:
            with torch.no_grad():
                for name, (places, values) in changes.items():
                    _words(self.live[name]).index_copy_(0, places.long(), values)
            _settle(self.live)
            self.changed_bytes = sum(places.nbytes + values.nbytes for places, values in changes.values())
        self._mirror, self.spare = self.spare, self._mirror

    def flip_back(self) -> None:
        self._changes = None
        self.flip()

    @torch.inference_mode()
    def _find_changes(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]] | None:
        """None where they are more than SPARSE_SHARE, or where a weight's words do not lie one after another."""
        limit = SPARSE_SHARE * sum(tensor.nbytes for tensor in self.live.values())
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        taken = 0
        for name, live in self.live.items():
            if not live.is_contiguous():
                return None
            served, staged = _words(live), _words(self.spare[name])
            step = max(1, self._chunk_bytes // _COMPARED_BYTES)
            places, values, own = [], [], 0
            for start in range(0, served.numel(), step):
                new = staged[start : start + step].to(served.device)
                differ = new != served[start : start + step]
                own += int(differ.count_nonzero()) * (4 + served.element_size())
                # Twice: a weight's parts are joined below.
                if taken + 2 * own > limit:
                    return None
                changed = differ.nonzero().flatten()
                places.append(changed.add_(start).to(torch.int32 if served.numel() < 1 << 31 else torch.int64))
                values.append(new[changed.sub_(start)])
            taken += own
            found[name] = torch.cat(places), torch.cat(values)
        return found


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers as integers of the same bits, flat: a NaN equals itself."""
    return tensor.detach().view(_WORDS[tensor.element_size()]).view(-1)


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@torch.no_grad()
def _copies(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def host_copies(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """In memory that a device reads and writes by itself, where there is one."""
    pin = any(tensor.is_cuda for tensor in tensors.values())
    made = {
        name: torch.empty_like(tensor, device="cpu", pin_memory=pin, memory_format=torch.preserve_format)
        for name, tensor in tensors.items()
    }
    _copy(made, tensors)
    return made


@torch.no_grad()
def _copy(into: Mapping[str, torch.Tensor], of: Mapping[str, torch.Tensor]) -> None:
    with beside(into if any(tensor.is_cuda for tensor in into.values()) else of):
        for target, source in zip(into.values(), of.values(), strict=True):
            target.copy_(source, non_blocking=True)


@contextmanager
def beside(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """On a stream of its own, which is through at the end; what was begun before on the present one comes first."""
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if device is None:
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _settle(tensors: Mapping[str, torch.Tensor]) -> None:
    """The next step begins when what was begun here is done."""
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if device is not None:
        torch.cuda.current_stream(device).synchronize()
