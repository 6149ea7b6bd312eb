"""The NIXL (RDMA) transport: the receiver READs the publisher's registered memory through UCX, without its help.

The manifest carries address, length and device as plain numbers, bounds-checked here before use. NIXL's own serialised
descriptors are pickles and are never read.

    publisher's arena   host    ── READ ──► receiver's memory, host
                        device  ── READ ──► 64 MiB of the receiver's device ── copy ──► its memory, host

Without a GPU a receiver reads another's memory into the host's directly.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weight_bus.errors import TransportError
from weight_bus.manifest.manifest import Manifest, NixlSource, Source
from weight_bus.memory.arena import Arena, private_arena
from weight_bus.transports.base import check_range
from weight_bus.transports.nixl_agent import (
    NOWHERE,
    MakeAgent,
    Place,
    cut,
    device_place,
    host_place,
    make_agent,
    register,
    usable,
)

if TYPE_CHECKING:
    import torch

    from weight_bus.memory.device import DeviceArena, DeviceMemory

_POLL_S = 50e-6
_KNOWN_AGENTS = 256
"""One for each publishing rank, read in turns; those of publishers that are gone go first."""
_KNOWN_BUFFERS = 4096
_UNREACHED = (
    "is the publisher gone, or at an address that this machine cannot reach, such as its own loopback? "
    "weights.nixl.devices names the network devices that both use, weights.nixl.transports how"
)
_SERVE_EVERY_S = 0.004
# Enough to keep a network busy while a piece is hashed. Within a host UCX copies as it posts: one would do as well.
_IN_FLIGHT = 4
_SLOT_BYTES = 16 << 20
"""Of the device, for one read in flight: a bucket of the default size."""
# Reads that were not done as they were posted, after which an agent is taken to be on another host.
_SLOW_READS = 3


class NixlExporter:
    """Registers arenas with NIXL for readers.

    NIXL's own progress thread spins and takes a whole core of the trainer (measured). Instead a thread here polls: UCX
    answers connections, and requests where the network needs the owner's help, at about 1 % of a core.
    """

    name = "nixl"

    def __init__(self, device: DeviceMemory | None = None, make: MakeAgent = make_agent) -> None:
        """`device`: whose memory `allocate_on_device` takes; None afterwards where NIXL does not take it."""
        self._agent = make("publisher", on_device=device is not None)
        self.device = usable(self._agent, device)
        self._lock = threading.Lock()
        self._arenas: list[tuple[Arena, Any]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nixl-exporter", daemon=True)
        self._thread.start()

    def allocate(self, nbytes: int) -> Arena:
        arena = private_arena(nbytes)
        with self._lock:
            self._arenas.append((arena, register(self._agent, arena.address, nbytes)))
        return arena

    def allocate_on_device(self, nbytes: int) -> DeviceArena:
        from weight_bus.memory.device import DeviceArena

        assert self.device is not None
        with self._lock, self.device.current():
            arena = DeviceArena(self.device, nbytes)
            known = register(self._agent, arena.address, nbytes, self.device.number, self.device.kind)
            self._arenas.append((arena, known))
        return arena

    def export(self, arena: Arena, draft: Manifest | None = None) -> Source:  # noqa: ARG002
        with self._lock:
            metadata = self._agent.get_agent_metadata()
        on_device = self.device if arena.on_device else None
        return NixlSource(
            agent=self._agent.name,
            metadata=metadata,
            address=arena.address,
            length=arena.nbytes,
            device=0 if on_device is None else on_device.number,
            memory="DRAM" if on_device is None else on_device.kind,
        )

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5.0)
        for arena, registration in self._arenas:
            self._agent.deregister_memory(registration)
            arena.close()
        self._arenas.clear()

    def _serve(self) -> None:
        while not self._closed.wait(_SERVE_EVERY_S):
            with self._lock:
                # There are no notifications; asking for them makes UCX progress without its thread.
                self._agent.get_new_notifs()


class NixlReader:
    """READs ranges of NIXL sources. `deadline_s` bounds each transfer; an idle reader uses no CPU.

    `device`: where sources in memory of its kind are read to first.
    """

    name = "nixl"

    def __init__(
        self, deadline_s: float = 30.0, device: DeviceMemory | None = None, make: MakeAgent = make_agent
    ) -> None:
        self._agent = make("receiver", on_device=device is not None)
        self._device = usable(self._agent, device)
        self._slots: torch.Tensor | None = None
        """Of the device, uint8 `[_IN_FLIGHT, _SLOT_BYTES]`; taken with the first read."""
        self._deadline_s = deadline_s
        self._agents: dict[str, bytes] = {}
        self._buffers: dict[int, tuple[int, Any, Any]] = {}
        """By address: bytes, what keeps them, and NIXL's own word for them."""
        self._slow_reads: Counter[str] = Counter()
        """By agent: how often `read_at_once` would have had to wait."""

    def can_read(self, source: Source) -> bool:
        return isinstance(source, NixlSource)

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        for _ in self.read_many(source, [(offset, out)]):
            pass

    def read_at_once(self, source: Source, offset: int, out: memoryview) -> bool:
        """`QuickReader`: within a host, where agent and buffer are known. UCX copies there as it posts a read."""
        source = _checked(source)
        if self._agents.get(source.agent) != source.metadata or source.memory != "DRAM":
            return False
        place = host_place(out)
        if place.nbytes and not self._is_registered(place):
            return False
        if self._slow_reads[source.agent] >= _SLOW_READS:
            return False
        try:
            inflight = self._post(source, 0, offset, place)
        except TransportError:
            self._forget(source.agent)
            raise
        state = inflight.state
        inflight.release()
        if state == "PROC":
            self._slow_reads[source.agent] += 1
        elif state != "DONE":
            self._forget(source.agent)
            raise self._lost(source, inflight, f"ended as {state}")
        return state == "DONE"

    def read_many(self, source: Source, pieces: Iterable[tuple[int, memoryview]]) -> Iterator[int]:
        source = _checked(source)
        if self._device is not None and source.memory == self._device.kind:
            return self._through_device(self._device, source, pieces)
        return self._read_many(source, ((offset, host_place(out)) for offset, out in pieces))

    def read_to_device(self, source: Source, pieces: Iterable[tuple[int, torch.Tensor]]) -> Iterator[int]:
        """`read_many` into uint8 `[n]` of the device: parts of one long-lived tensor, whose storage is registered."""
        assert self._device is not None
        number, kind = self._device.number, self._device.kind
        places = ((offset, device_place(out, number, kind)) for offset, out in pieces)
        return self._read_many(_checked(source), places)

    def _through_device(
        self, device: DeviceMemory, source: NixlSource, pieces: Iterable[tuple[int, memoryview]]
    ) -> Iterator[int]:
        if self._slots is None:
            self._slots = device.allocate(_IN_FLIGHT * _SLOT_BYTES).view(_IN_FLIGHT, _SLOT_BYTES)
        slots = self._slots
        under_way: deque[tuple[int, memoryview, torch.Tensor, bool]] = deque()

        def into_slots() -> Iterator[tuple[int, torch.Tensor]]:
            # Reads end in their order: when one is posted, the slot of the fourth before it has been copied.
            for number, (index, offset, part, last) in enumerate(cut(pieces, _SLOT_BYTES)):
                slot = slots[number % _IN_FLIGHT, : len(part)]
                under_way.append((index, part, slot, last))
                yield offset, slot

        for _ in self.read_to_device(source, into_slots()):
            index, part, slot, last = under_way.popleft()
            if len(part):
                device.to_host(slot, part)
            if last:
                yield index

    def _read_many(self, source: NixlSource, pieces: Iterable[tuple[int, Place]]) -> Iterator[int]:
        while len(self._buffers) > _KNOWN_BUFFERS:
            self._forget_buffer(next(iter(self._buffers)))
        waiting = enumerate(pieces)
        inflight_reads: deque[_InflightRead] = deque()
        more = True
        try:
            while more or inflight_reads:
                while more and len(inflight_reads) < _IN_FLIGHT:
                    index, (offset, place) = next(waiting, (-1, (0, NOWHERE)))
                    more = index >= 0
                    if more:
                        inflight_reads.append(self._post(source, index, offset, place))
                if inflight_reads:
                    self._wait(source, inflight_reads[0])
                    yield inflight_reads.popleft().index
        except TransportError:
            _release(inflight_reads)
            self._forget(source.agent)
            raise
        finally:
            _release(inflight_reads)

    def close(self) -> None:
        for agent in list(self._agents):
            self._forget(agent)
        for address in list(self._buffers):
            self._forget_buffer(address)
        self._slots = None

    def _add_agent(self, source: NixlSource) -> None:
        if self._agents.get(source.agent) == source.metadata:
            return
        self._forget(source.agent)
        while len(self._agents) >= _KNOWN_AGENTS:
            self._forget(next(iter(self._agents)))
        try:
            named = self._agent.add_remote_agent(source.metadata)
        except Exception as error:
            raise TransportError(f"NIXL cannot reach the agent {source.agent} ({error})", _UNREACHED) from error
        if named.decode() != source.agent:
            self._agent.remove_remote_agent(named.decode())
            raise TransportError(f"a source of {source.agent} came with the metadata of {named.decode()}")
        self._agents[source.agent] = source.metadata

    def _forget(self, agent: str) -> None:
        self._slow_reads.pop(agent, None)
        if self._agents.pop(agent, None) is not None:
            self._agent.remove_remote_agent(agent)

    def _is_registered(self, place: Place) -> bool:
        address, nbytes, _ = place.within
        known = self._buffers.get(address)
        return known is not None and known[0] == nbytes

    def _register_buffer(self, place: Place) -> None:
        if self._is_registered(place):
            return
        address, nbytes, kept = place.within
        if address in self._buffers:
            self._forget_buffer(address)
        # What it is part of is kept: memory that NIXL knows must not be freed and given to something else.
        self._buffers[address] = (nbytes, kept, register(self._agent, address, nbytes, place.device, place.kind))

    def _forget_buffer(self, address: int) -> None:
        _, _, registration = self._buffers.pop(address)
        self._agent.deregister_memory(registration)

    def _post(self, source: NixlSource, index: int, offset: int, place: Place) -> _InflightRead:
        check_range(source.length, offset, place.nbytes)
        inflight = _InflightRead(index, place.nbytes, time.monotonic() + self._deadline_s)
        if not place.nbytes:
            return inflight
        with nullcontext() if self._device is None else self._device.current():
            self._add_agent(source)
            self._register_buffer(place)
            try:
                remote = (source.address + offset, place.nbytes, source.device)
                inflight.handle = self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs([place.described], place.kind),
                    self._agent.get_xfer_descs([remote], source.memory),
                    source.agent,
                )
                inflight.state = str(self._agent.transfer(inflight.handle))
            except Exception as error:
                inflight.release()
                raise self._lost(source, inflight, f"failed ({error})") from error
        return inflight

    def _wait(self, source: NixlSource, inflight: _InflightRead) -> None:
        """Poll until the transfer is done, its deadline has passed or it has failed."""
        try:
            while inflight.state == "PROC" and time.monotonic() < inflight.deadline:
                time.sleep(_POLL_S)
                inflight.state = str(self._agent.check_xfer_state(inflight.handle))
        except Exception as error:
            raise self._lost(source, inflight, f"failed ({error})") from error
        if inflight.state == "PROC":
            raise self._lost(source, inflight, f"did not end within {self._deadline_s} s")
        if inflight.state != "DONE":
            raise self._lost(source, inflight, f"ended as {inflight.state}")
        inflight.release()

    def _lost(self, source: NixlSource, inflight: _InflightRead, what: str) -> TransportError:
        return TransportError(
            f"READ of {inflight.nbytes} bytes from {source.agent} {what}",
            _UNREACHED,
        )


@dataclass
class _InflightRead:
    """One READ under way. `state` is NIXL's: DONE, PROC (still going) or an error."""

    index: int
    nbytes: int
    deadline: float
    state: str = "DONE"
    handle: Any = None

    def release(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.release()


def _checked(source: Source) -> NixlSource:
    """Raises TransportError for another kind of source, and for an address that no memory has."""
    if not isinstance(source, NixlSource):
        raise TransportError(f"the nixl reader cannot read a {type(source).__name__}")
    if source.address <= 0 or source.address + source.length >= 1 << 64:
        raise TransportError(f"{source.agent} offers {source.length} bytes at the impossible address {source.address}")
    return source


def _release(inflight_reads: deque[_InflightRead]) -> None:
    while inflight_reads:
        inflight_reads.popleft().release()
