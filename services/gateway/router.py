"""Router: a call goes to the server that holds its session, else where `services.policies.routing` says.

    a call names      │ known here                    │ unknown
    ──────────────────┼───────────────────────────────┼──────────────────────────────────────────────────────────────
    a session, group  │ the server that answered last │ by rendezvous hashing; a 421 then says who holds it
    a new group       │ the siblings' server          │ where its problem was seen, else the least loaded
    nothing           │                               │ where its prompt's prefix was computed, else the least loaded

All that is remembered here may be forgotten: a wrong guess costs one more hop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from services.config.settings import GatewaySettings
from services.gateway.request import ProxiedCall, read_body
from services.gateway.servers import Server, Servers
from services.policies.routing import Candidate, block_keys, place, rendezvous
from services.wire.errors import UNDECODABLE

_BLOCK = 64
_MOST_BLOCKS = 128
_LARGEST_LOOKED_AT = 1 << 22
"""Bytes of a call above which its prompt is not decoded here: a million tokens would stall all other calls."""
_MOST_HOLDERS = 4
"""Servers that are remembered for one prefix."""

Prefix = bytes | tuple[str, str]


class _Opening(msgspec.Struct):
    """What `POST /sessions` says of where it belongs."""

    session_id: str | None = None
    group_id: str | None = None
    env: str = ""
    task_id: str = ""


class _Opened(msgspec.Struct):
    """What the answers of `POST /sessions` and `POST /groups` have in common."""

    group_id: str
    session_id: str | None = None
    session_ids: list[str] = []


class _Prompt(msgspec.Struct):
    token_ids: list[int] = []


_opening = msgspec.json.Decoder(_Opening)
_opened = msgspec.json.Decoder(_Opened)
_prompt = msgspec.json.Decoder(_Prompt)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one call belongs. `key`: what it is remembered by where it names something, and hashed by in any case.

    `prefixes`: what it shares with others, longest last.
    """

    key: str
    names_something: bool
    prefixes: Sequence[Prefix]


class Router:
    """Chooses servers and remembers which ones answered."""

    def __init__(self, servers: Servers, settings: GatewaySettings) -> None:
        self._servers = servers
        self._slack = settings.prefix_slack
        self._group_of: Lru[str, str] = Lru(settings.remembered)
        self._open_in: Lru[str, set[str]] = Lru(settings.remembered)
        """The sessions of a group that were opened here, and not ended here."""
        self._holders: Lru[str, str] = Lru(settings.remembered)
        self._prefix_holders: Lru[Prefix, tuple[str, ...]] = Lru(settings.remembered)

    def destination(self, call: ProxiedCall) -> Destination:
        """Read off a call where it belongs; once a call."""
        if call.group_id is not None:
            return Destination(f"group {call.group_id}", True, [])
        if call.is_stateless:
            return Destination(call.call_id, False, _prefixes(call.body))
        if call.session_id is not None:
            return Destination(self._key_of(call.session_id), True, [])
        if call.opens:
            return self._opening(call)
        return Destination(call.call_id, False, [])

    def choose(self, call: ProxiedCall, destination: Destination, tried: Collection[str]) -> Server | None:
        """A server that serves and is not in `tried`; None where there is none."""
        servers = [server for server in self._servers.serving() if server.name not in tried]
        if not servers:
            return None
        chosen = self._choose(call, destination, {server.name: server for server in servers})
        if call.opens and destination.names_something:
            # Siblings may come before the first is answered.
            self._holders.put(destination.key, chosen.name)
        for prefix in destination.prefixes:
            self._remember(prefix, chosen.name)
        return chosen

    def held_by(self, destination: Destination, server: Server) -> None:
        """A server has said that it, or another has said that this one, holds what the call names."""
        if destination.names_something and self._holders.get(destination.key) != server.name:
            self._holders.put(destination.key, server.name)

    def opened(self, server: Server, body: bytes) -> None:
        """A server has answered that it opened a session or a group."""
        try:
            answer = _opened.decode(body)
        except UNDECODABLE:
            return
        sessions = answer.session_ids or ([answer.session_id] if answer.session_id else [])
        self._holders.put(f"group {answer.group_id}", server.name)
        still_open = self._open_in.get(answer.group_id) or set()
        # A call that is sent again is answered again.
        server.sessions_changed(len(set(sessions) - still_open))
        self._open_in.put(answer.group_id, still_open.union(sessions))
        for session_id in sessions:
            self._group_of.put(session_id, answer.group_id)

    def ended(self, server: Server, call: ProxiedCall) -> None:
        """A server has answered that a session or a group has ended."""
        group_id = call.group_id or self._group_of.get(call.session_id or "")
        still_open = self._open_in.get(group_id or "")
        if group_id is None or still_open is None:
            return
        left = still_open - {call.session_id} if call.group_id is None else set[str]()
        server.sessions_changed(len(left) - len(still_open))
        if left:
            self._open_in.put(group_id, left)
        else:
            self._open_in.drop(group_id)

    def _choose(self, call: ProxiedCall, destination: Destination, servers: dict[str, Server]) -> Server:
        if destination.names_something:
            holder = servers.get(self._holders.get(destination.key) or "")
            if holder is not None:
                return holder
            if not call.opens:
                return servers[rendezvous(destination.key, servers)]
        # What a new group will cost shows in the sessions that are open, long before their first call.
        candidates = [
            Candidate(name, each.busy + (each.sessions if call.opens else 0), each.record.max_running)
            for name, each in servers.items()
        ]
        holders = next(filter(None, map(self._prefix_holders.get, reversed(destination.prefixes))), ())
        return servers[place(candidates, destination.key, holders, self._slack).name]

    def _key_of(self, session_id: str) -> str:
        """Sessions go where their group is: one server holds them all."""
        group_id = self._group_of.get(session_id)
        return f"session {session_id}" if group_id is None else f"group {group_id}"

    def _opening(self, call: ProxiedCall) -> Destination:
        hints = _Opening()
        if call.path == "/sessions":
            hints = read_body(_opening.decode, call.body) or hints
        shared: list[Prefix] = [(hints.env, hints.task_id)] if hints.task_id else []
        if hints.group_id is not None:
            return Destination(f"group {hints.group_id}", True, shared)
        if hints.session_id is not None:
            return Destination(self._key_of(hints.session_id), True, shared)
        return Destination(call.call_id, False, shared)

    def _remember(self, prefix: Prefix, server_id: str) -> None:
        holders = self._prefix_holders.get(prefix) or ()
        if server_id not in holders:
            self._prefix_holders.put(prefix, (*holders, server_id)[-_MOST_HOLDERS:])


def _prefixes(body: bytes) -> list[bytes]:
    if len(body) > _LARGEST_LOOKED_AT:
        return []
    prompt = read_body(_prompt.decode, body)
    try:
        return [] if prompt is None else block_keys(prompt.token_ids, _BLOCK, _MOST_BLOCKS)
    except OverflowError:
        return []


K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Least-recently-used cache of at most `limit` entries, so that a gateway's memory is bounded."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The entry, which counts as used now; None where there is none."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def drop(self, key: K) -> None:
        self._entries.pop(key, None)

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)
