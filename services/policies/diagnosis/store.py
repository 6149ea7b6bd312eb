"""Findings of the Redis that a run is kept in, and of clocks that differ from its own. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.policies.diagnosis.finding import Finding, error, warning

OLDEST = (6, 2)
"""The oldest Redis with all commands that a run uses: `XTRIM … MINID` came with 6.2. Valkey began with 7.2."""
MOST_SKEW_S = 2.0
"""Between clocks of hosts: below a service's lease (3 s), and above what a look over the network is wrong by."""
LEAST_MEMORY = 64 << 20
"""A run of the tiny policy fills a few MiB; with a smaller maxmemory nothing of a user's own fits."""


@dataclass(frozen=True)
class StoreFacts:
    """What a Redis says of itself; None where it does not tell this user. `url`: as it may be printed.

    `version`: (major, minor); `maxmemory`: bytes, 0 for none; `appendonly`, `saves`: whether it keeps an append-only file,
    or snapshots.
    """

    url: str
    version: tuple[int, int] | None = None
    eviction: str | None = None
    maxmemory: int | None = None
    appendonly: bool | None = None
    saves: bool | None = None


def of_store(store: StoreFacts) -> Iterator[Finding]:
    """The errors first."""
    where = f"Redis at {store.url}"
    if store.version is not None and store.version < OLDEST:
        yield error(
            "redis-too-old",
            f"{where} is too old",
            f"it is version {store.version[0]}.{store.version[1]}, a run needs {OLDEST[0]}.{OLDEST[1]} or newer",
            "use a newer Redis or Valkey, or leave --redis-url out for the embedded one",
        )
    if store.eviction is not None and store.eviction != "noeviction":
        yield error(
            "redis-evicts",
            f"{where} evicts keys when its memory is full: a run would lose trajectories and sessions without a word",
            f"maxmemory-policy {store.eviction}",
            "set it to noeviction: redis-cli CONFIG SET maxmemory-policy noeviction, or in its configuration",
        )
    if store.maxmemory and store.maxmemory < LEAST_MEMORY:
        yield warning(
            "redis-memory",
            f"{where} has little memory: groups are admitted only while there is room",
            f"maxmemory {store.maxmemory >> 20} MiB",
            "raise maxmemory",
        )
    if store.appendonly is False:
        kept = "snapshots alone" if store.saves else "nothing"
        yield warning(
            "redis-persistence",
            f"{where} would lose a run's trajectories when it ends",
            f"appendonly no: it keeps {kept} on disk",
            "set appendonly yes: redis-cli CONFIG SET appendonly yes, or in its configuration",
        )


def of_clocks(ahead_s: Mapping[str, float], against: str) -> Iterator[Finding]:
    """`ahead_s`: by how many seconds a clock is ahead of that of `against`, by whose it is."""
    for whose, ahead in sorted(ahead_s.items()):
        if abs(ahead) > MOST_SKEW_S:
            yield error(
                "clock-skew",
                f"the clock of {whose} is wrong, or that of {against}",
                f"it is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} {against}",
                "synchronise the hosts' clocks (NTP): leases, waits and curves are told in their times",
            )
