"""Authorization rules: which key grants which scope, which keys each service reads, and which it needs off loopback. Pure.

| scope         | granted by         | routes                                                                      |
|---------------|--------------------|-----------------------------------------------------------------------------|
| `environment` | agent              | sessions, groups, rewards; a session's own key is valid for that session too |
| `reading`     | agent, admin, peer | state of the run and of an engine, generation outside sessions              |
| `service`     | admin, peer        | calls between services: weights, updates, pauses                            |
| `operator`    | admin              | manual operations: rollback, drain, pushing a snapshot                      |
| `metrics`     | metrics, and those of `service` | `/metrics`                                                     |

A service without any key accepts every caller, and listens on loopback only. A service with a key has no open route: where
none of the keys that grant a scope is configured, every configured key grants it, but for the metrics key: it lies where
figures are collected, and opens nothing else.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from services.wire.errors import ForbiddenError, RollmeshError, UnauthenticatedError, UsageError

BearerName = Literal["agent", "admin", "peer", "metrics"]
"""Keys that a caller shows."""
KeyName = Literal["agent", "admin", "peer", "metrics", "weights", "session", "redis"]
AuthScope = Literal["environment", "reading", "service", "operator", "metrics"]
ServiceName = Literal["rollout-server", "gateway", "weight-bus", "rewards", "trainer", "dashboard"]
HolderName = Literal[ServiceName, "engine", "environment", "operator", "reader", "supervisor"]

OPENED_BY: Mapping[AuthScope, tuple[BearerName, ...]] = MappingProxyType(
    {
        "environment": ("agent",),
        "reading": ("agent", "admin", "peer"),
        "service": ("admin", "peer"),
        "operator": ("admin",),
        "metrics": ("admin", "metrics", "peer"),
    }
)
_BEARERS: tuple[BearerName, ...] = get_args(BearerName)
OFF_LOOPBACK: Mapping[ServiceName, tuple[KeyName, ...]] = MappingProxyType(
    {
        "rollout-server": ("agent", "admin", "weights"),
        "gateway": ("agent", "admin"),
        "weight-bus": ("admin", "weights"),
        "rewards": ("agent",),
        "trainer": ("peer",),
        "dashboard": ("agent", "admin"),
    }
)
"""A service that lacks one of these listens on loopback only."""
GIVEN: Mapping[HolderName, tuple[KeyName, ...]] = MappingProxyType(
    {
        "rollout-server": ("agent", "admin", "peer", "metrics", "weights", "session", "redis"),
        "gateway": ("agent", "admin", "peer", "metrics", "session", "redis"),
        "weight-bus": ("admin", "peer", "metrics", "weights"),
        "rewards": ("agent", "admin", "peer", "metrics"),
        "engine": ("admin", "peer", "weights"),
        "trainer": ("peer", "metrics", "weights", "redis"),
        "dashboard": ("agent", "admin", "peer", "metrics", "redis"),
        "environment": ("agent",),
        "operator": ("admin",),
        "reader": ("redis",),
        "supervisor": ("peer", "redis"),
    }
)
"""The keys that each process reads from a folder of keys: those it sends and those it checks."""


@dataclass(frozen=True)
class Keys:
    """The keys of one process; None for those it was not given. They are left out of `repr`, and so out of logs.

    `weights` signs manifests, `session` derives session keys, `redis` is Redis's password; the others are bearer tokens.
    """

    agent: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)
    peer: str | None = field(default=None, repr=False)
    metrics: str | None = field(default=None, repr=False)
    weights: str | None = field(default=None, repr=False)
    session: str | None = field(default=None, repr=False)
    redis: str | None = field(default=None, repr=False)

    def get(self, name: KeyName) -> str | None:
        key: str | None = getattr(self, name)
        return key


NO_KEYS = Keys()


def lacking(keys: Keys, service: ServiceName) -> tuple[KeyName, ...]:
    """The missing keys that a service needs to listen off loopback; empty: it may listen anywhere."""
    return tuple(name for name in OFF_LOOPBACK[service] if keys.get(name) is None)


def is_keyless(keys: Keys) -> bool:
    """Whether a service with these keys accepts every caller."""
    return not _configured(keys)


def openers(keys: Keys, scope: AuthScope) -> frozenset[BearerName]:
    """The keys that grant `scope` in a service that has `keys`; none in a keyless one, or with a metrics key alone."""
    configured = _configured(keys)
    return configured.intersection(OPENED_BY[scope]) or configured - {"metrics"}


def _configured(keys: Keys) -> frozenset[BearerName]:
    return frozenset(name for name in _BEARERS if keys.get(name) is not None)


def environment_key(keys: Keys) -> str | None:
    """The key with which a service of the mesh calls as environments do; None where there is none."""
    return next((keys.get(name) for name in sorted(openers(keys, "environment"))), None)


def refusal(shown: str, keys: Keys, scope: AuthScope) -> RollmeshError | None:
    """The UnauthenticatedError or ForbiddenError for a caller with this bearer token; None: it is authorized.

    Compares in constant time.
    """
    held = {name for name in _BEARERS if _is(shown, keys.get(name))}
    # First what nearly every call shows: a key of the scope's own.
    if not held.isdisjoint(OPENED_BY[scope]) or held & (opening := openers(keys, scope)) or is_keyless(keys):
        return None
    wanted = " or ".join(f"the {name} key" for name in sorted(opening)) or "a key that this service was not given"
    if held:
        return ForbiddenError(f"the {min(held)} key is not valid for this route", f"send {wanted}")
    return UnauthenticatedError("no valid key", f"send `Authorization: Bearer` with {wanted}")


def _is(shown: str, key: str | None) -> bool:
    # Compared as bytes: a header may hold any character.
    return key is not None and hmac.compare_digest(shown.encode(), key.encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Whether this is the wildcard address (0.0.0.0, ::), which a service listens on but no client connects to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def require_loopback(host: str, lacking: Sequence[str]) -> None:
    """Raise UsageError for an address that is not loopback where keys are lacking."""
    if lacking and not is_loopback(host):
        raise UsageError(
            f"{host} is not a loopback address, and there is no {' and no '.join(lacking)} key",
            "bind 127.0.0.1, or give --keys-dir (`rollmesh keys init`)",
        )
