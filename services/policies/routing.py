"""Prefix-aware load balancing: which rollout server a call goes to that is bound to none.

    load(server)  =  (busy + 1) / capacity                          as if it had the call already
    place         =  a server that has computed the prefix, while it is busier than its share by at most `slack` calls,
                     else the least loaded one; ties go by rendezvous hashing of the call's key
    rendezvous    =  the name with the highest hash of (key, name): when a server leaves, only its own keys move

A server's share is what it would hold at the load of the least loaded one. So of servers with one capacity, none is ever
sent a call while it holds more than `slack` calls above the idlest.

What a server holds is known as of its last heartbeat; what came and went since is counted on top of it
(`HeartbeatDelta`).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live server. `busy`: calls (for a new group: and open sessions) that it holds; `capacity`: samples at once."""

    name: str
    busy: int
    capacity: int


class HeartbeatDelta:
    """A count, and by how much it has changed since a heartbeat. Times are of one clock.

    A heartbeat is read some time after it was made, so what the count was meanwhile is kept.
    """

    _MOST = 1 << 12

    def __init__(self) -> None:
        self.count = 0
        self._then = 0
        self._past: deque[tuple[float, int]] = deque(maxlen=self._MOST)
        """When it changed since the heartbeat, and what it was before: the last changes only, where they are many."""

    @property
    def delta(self) -> int:
        return self.count - self._then

    def add(self, change: int, now: float) -> None:
        self._past.append((now, self.count))
        self.count += change

    def rebase(self, heartbeat: float) -> None:
        """From now on the delta is since that time, which is not before that of an earlier call."""
        while self._past and self._past[0][0] <= heartbeat:
            self._past.popleft()
        self._then = self._past[0][1] if self._past else self.count


def load(candidate: Candidate) -> float:
    """How full the server would be with one more call; a capacity that it does not tell counts as 1."""
    return (candidate.busy + 1) / max(candidate.capacity, 1)


def rendezvous(key: str, names: Iterable[str]) -> str:
    """The one of `names` that `key` belongs to, whatever their order. Raises ValueError without any."""
    return max(names, key=lambda name: (_weight(key, name), name))


def least_loaded(candidates: Sequence[Candidate], key: str) -> Candidate:
    """The least loaded server; of equal ones, the one that `key` belongs to. Raises ValueError without any."""
    lightest = min(load(each) for each in candidates)
    tied = {each.name: each for each in candidates if load(each) == lightest}
    return tied[rendezvous(key, tied)] if len(tied) > 1 else next(iter(tied.values()))


def place(candidates: Sequence[Candidate], key: str, homes: Collection[str], slack: int) -> Candidate:
    """Where a call goes whose prefix the servers named `homes` have computed before.

    `slack` ≥ 0: how many calls above its share a home may hold and still get it. Raises ValueError without candidates.
    """
    lightest = least_loaded(candidates, key)
    if lightest.name in homes:
        return lightest
    known = [each for each in candidates if each.name in homes]
    if not known:
        return lightest
    home = least_loaded(known, key)
    share = load(lightest) * max(home.capacity, 1) - 1
    return home if home.busy <= share + slack else lightest


def block_keys(token_ids: Sequence[int], block: int, most: int) -> list[bytes]:
    """Keys of the prompt's prefixes of 1, 2, … whole blocks of `block` ids, at most `most`; each covers all before it.

    Raises OverflowError for an id beyond 64 bits.
    """
    keys: list[bytes] = []
    key = b""
    for start in range(0, min(len(token_ids) // block, most) * block, block):
        ids = array("q", token_ids[start : start + block])
        key = blake2b(key + ids.tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


def _weight(key: str, name: str) -> bytes:
    return blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()
