"""The NIXL (RDMA) transport: the receiver READs the publisher's registered memory through UCX, without its help.

The manifest carries address, length and device as plain numbers, bounds-checked here before use. NIXL's own serialised
descriptors are pickles and are never read.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from weight_bus.errors import TransportError
from weight_bus.manifest.manifest import Manifest, NixlSource, Source
from weight_bus.memory.arena import Arena, address_of, private_arena
from weight_bus.transports.base import check_range
from weight_bus.transports.environment import NIXL_BACKEND
from weight_bus.transports.nixl_wheel import nixl_module

# Measured on one host: five times as fast as the default list; without tcp it cannot connect.
UCX_TRANSPORTS = "tcp,cma,posix,sysv,self"
# A tenth faster within a host than UCX's default of 512 KiB.
UCX_SEGMENT = "16m"
_PIN_NOTHING = frozenset(UCX_TRANSPORTS.split(","))
_MEMORY = "DRAM"
_POLL_S = 50e-6
_KNOWN_AGENTS = 256
"""One for each publishing rank, read in turns; those of publishers that are gone go first."""
_KNOWN_BUFFERS = 4096
_UNREACHED = (
    "is the publisher gone, or at an address that this machine cannot reach, such as its own loopback? "
    "weights.nixl.devices names the network devices that both use, weights.nixl.transports how"
)
_NOTHING = memoryview(b"")
_SERVE_EVERY_S = 0.004
# Enough to keep a network busy while a piece is hashed. Within a host UCX copies as it posts: one would do as well.
_IN_FLIGHT = 4
# Reads that were not done as they were posted, after which an agent is taken to be on another host.
_SLOW_READS = 3


class NixlExporter:
    """Registers arenas with NIXL for readers.

    NIXL's own progress thread spins and takes a whole core of the trainer (measured). Instead a thread here polls: UCX
    answers connections, and requests where the network needs the owner's help, at about 1 % of a core.
    """

    name = "nixl"

    def __init__(self) -> None:
        self._agent = make_agent("publisher")
        self._lock = threading.Lock()
        self._arenas: list[tuple[Arena, Any]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nixl-exporter", daemon=True)
        self._thread.start()

    def allocate(self, nbytes: int) -> Arena:
        arena = private_arena(nbytes)
        with self._lock:
            self._arenas.append((arena, _register(self._agent, arena.address, nbytes)))
        return arena

    def export(self, arena: Arena, draft: Manifest | None = None) -> Source:  # noqa: ARG002
        with self._lock:
            metadata = self._agent.get_agent_metadata()
        return NixlSource(
            agent=self._agent.name, metadata=metadata, address=arena.address, length=arena.nbytes, device=0
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
    """READs ranges of NIXL sources. `deadline_s` bounds each transfer; an idle reader uses no CPU."""

    name = "nixl"

    def __init__(self, deadline_s: float = 30.0) -> None:
        self._agent = make_agent("receiver")
        self._deadline_s = deadline_s
        self._agents: dict[str, bytes] = {}
        self._buffers: dict[int, tuple[memoryview, Any]] = {}
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
        if self._agents.get(source.agent) != source.metadata or not self._is_registered(out):
            return False
        if self._slow_reads[source.agent] >= _SLOW_READS:
            return False
        try:
            inflight = self._post(source, 0, offset, out)
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
        while len(self._buffers) > _KNOWN_BUFFERS:
            self._forget_buffer(next(iter(self._buffers)))
        waiting = enumerate(pieces)
        inflight_reads: deque[_InflightRead] = deque()
        more = True
        try:
            while more or inflight_reads:
                while more and len(inflight_reads) < _IN_FLIGHT:
                    index, (offset, out) = next(waiting, (-1, (0, _NOTHING)))
                    more = index >= 0
                    if more:
                        inflight_reads.append(self._post(source, index, offset, out))
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

    def _is_registered(self, out: memoryview) -> bool:
        with memoryview(out.obj) as whole:
            known = self._buffers.get(address_of(whole))
            return known is not None and known[0].nbytes == whole.nbytes

    def _register_buffer(self, out: memoryview) -> None:
        whole = memoryview(out.obj)
        address = address_of(whole)
        known = self._buffers.get(address)
        if known is not None and known[0].nbytes == whole.nbytes:
            whole.release()
            return
        if known is not None:
            self._forget_buffer(address)
        # The view is kept: memory that NIXL knows must not be freed and given to something else.
        self._buffers[address] = (whole, _register(self._agent, address, whole.nbytes))

    def _forget_buffer(self, address: int) -> None:
        view, registration = self._buffers.pop(address)
        self._agent.deregister_memory(registration)
        view.release()

    def _post(self, source: NixlSource, index: int, offset: int, out: memoryview) -> _InflightRead:
        check_range(source.length, offset, len(out))
        inflight = _InflightRead(index, len(out), time.monotonic() + self._deadline_s)
        if not len(out):
            return inflight
        self._add_agent(source)
        self._register_buffer(out)
        try:
            inflight.handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs([(address_of(out), len(out), 0)], _MEMORY),
                self._agent.get_xfer_descs([(source.address + offset, len(out), source.device)], _MEMORY),
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


def ucx_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that UCX reads when it is loaded, where the user has set no others."""
    transports = environment.get("UCX_TLS", UCX_TRANSPORTS).split(",")
    wanted = {"UCX_TLS": UCX_TRANSPORTS}
    if not _PIN_NOTHING.issuperset(transports) or "cma" in transports:
        # UCX warns of variables that nothing reads.
        wanted["UCX_CMA_SEG_SIZE"] = UCX_SEGMENT
    if _PIN_NOTHING.issuperset(transports):
        # UCX rewrites the C library's memory calls, with 0.4 s of busy waiting, to notice when memory is unmapped that a
        # network card has pinned. These transports pin none.
        wanted["UCX_MEM_MMAP_HOOK_MODE"] = "none"
    return {name: value for name, value in wanted.items() if name not in environment}


def make_agent(role: str) -> Any:
    """A NIXL agent on UCX whose name no other process has. Raises TransportError when UCX cannot start."""
    os.environ.update(ucx_settings(os.environ))
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    api = import_module(f"{nixl_module()}._api")
    name = f"rollmesh-{role}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        backend = os.environ.get(NIXL_BACKEND, "UCX")
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[backend]))
    except Exception as error:
        raise TransportError(
            f"NIXL could not start ({error})",
            f"see weights.nixl: try weights.nixl.transports={UCX_TRANSPORTS.split(',')}, or weights.transport=shm",
        ) from error
    return agent


def _register(agent: Any, address: int, nbytes: int) -> Any:
    try:
        return agent.register_memory([(address, nbytes, 0, "")], _MEMORY)
    except Exception as error:
        raise TransportError(f"NIXL could not register {nbytes} bytes ({error})") from error
