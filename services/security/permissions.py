"""Which key opens which door, which keys each service is given, and without which it stays on loopback. Pure.

| door          | opened by               | behind it                                                             |
|---------------|-------------------------|-----------------------------------------------------------------------|
| `environment` | agent                   | sessions, groups, rewards; a session's own key opens that session too |
| `reading`     | agent, admin, peer      | how the run and an engine stand, generating tokens outside sessions      |
| `service`     | admin, peer             | what the mesh's parts ask of each other: weights, updates, pauses     |
| `operator`    | admin                   | what only a person does: rollback, drain, pushing a snapshot          |

A service without any key lets everybody in, and is bound to loopback. One with a key has no open door: where none of the
keys that a door asks for is configured, each of those that are opens it.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from services.wire.errors import ForbiddenError, RollmeshError, UnauthenticatedError, UsageError

BearerName = Literal["agent", "admin", "peer"]
"""Keys that a caller shows."""
KeyName = Literal["agent", "admin", "peer", "weights", "session", "redis"]
AuthScope = Literal["environment", "reading", "service", "operator"]
ServiceName = Literal["rollout-server", "gateway", "weight-bus", "rewards", "trainer"]
HolderName = Literal[ServiceName, "engine", "environment", "operator", "reader", "supervisor"]

OPENED_BY: Mapping[AuthScope, tuple[BearerName, ...]] = MappingProxyType(
    {
        "environment": ("agent",),
        "reading": ("agent", "admin", "peer"),
        "service": ("admin", "peer"),
        "operator": ("admin",),
    }
)
OFF_LOOPBACK: Mapping[ServiceName, tuple[KeyName, ...]] = MappingProxyType(
    {
        "rollout-server": ("agent", "admin", "weights"),
        "gateway": ("agent", "admin"),
        "weight-bus": ("admin", "weights"),
        "rewards": ("agent",),
        "trainer": ("peer",),
    }
)
"""Without all of these a service listens on loopback only."""
GIVEN: Mapping[HolderName, tuple[KeyName, ...]] = MappingProxyType(
    {
        "rollout-server": ("agent", "admin", "peer", "weights", "session", "redis"),
        "gateway": ("agent", "admin", "peer", "redis"),
        "weight-bus": ("admin", "peer", "weights"),
        "rewards": ("agent", "admin", "peer"),
        "engine": ("admin", "peer", "weights"),
        "trainer": ("peer", "weights", "redis"),
        "environment": ("agent",),
        "operator": ("admin",),
        "reader": ("redis",),
        "supervisor": ("peer", "redis"),
    }
)
"""What each process reads from a folder of keys: what it shows and what it checks, nothing else."""


@dataclass(frozen=True)
class Keys:
    """The keys that one process was given; None where it was not. They stay out of `repr`, and so out of logs.

    `weights` signs manifests, `session` makes session keys, `redis` is Redis's password; the others are shown as bearers.
    """

    agent: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)
    peer: str | None = field(default=None, repr=False)
    weights: str | None = field(default=None, repr=False)
    session: str | None = field(default=None, repr=False)
    redis: str | None = field(default=None, repr=False)

    def get(self, name: KeyName) -> str | None:
        key: str | None = getattr(self, name)
        return key


NO_KEYS = Keys()


def lacking(keys: Keys, service: ServiceName) -> tuple[KeyName, ...]:
    """The keys for want of which a service must stay on loopback; none: it may listen anywhere."""
    return tuple(name for name in OFF_LOOPBACK[service] if keys.get(name) is None)


def openers(keys: Keys, scope: AuthScope) -> frozenset[BearerName]:
    """The keys that open a door of a service with these keys; none: it is open to everybody."""
    configured = frozenset(name for name in get_args(BearerName) if keys.get(name) is not None)
    return configured.intersection(OPENED_BY[scope]) or configured


def refusal(shown: str, keys: Keys, scope: AuthScope) -> RollmeshError | None:
    """Why a caller with this bearer stays outside: UnauthenticatedError or ForbiddenError; None: it may come in.

    Compares in constant time.
    """
    opening = openers(keys, scope)
    if not opening:
        return None
    held = {name for name in get_args(BearerName) if _is(shown, keys.get(name))}
    if held & opening:
        return None
    wanted = " or ".join(f"the {name} key" for name in sorted(opening))
    if held:
        return ForbiddenError(f"the {min(held)} key does not open this", f"show {wanted}")
    return UnauthenticatedError("no valid key", f"send `Authorization: Bearer` with {wanted}")


def _is(shown: str, key: str | None) -> bool:
    # Compared as bytes: a header may hold any character.
    return key is not None and hmac.compare_digest(shown.encode(), key.encode())


# Where a service may listen: on loopback, and elsewhere only with the keys that it asks its callers for. Pure.


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Whether an address stands for all of the machine's: one to listen on, and nobody's name."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def require_loopback(host: str, lacking: Sequence[str]) -> None:
    """Raise UsageError for another address where keys are lacking: no open door (promise 6)."""
    if lacking and not is_loopback(host):
        raise UsageError(
            f"{host} is not a loopback address, and there is no {' and no '.join(lacking)} key",
            "bind 127.0.0.1, or give --keys-dir (`rollmesh keys init`)",
        )
