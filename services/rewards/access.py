"""Who may have samples judged: whoever shows the service's key, and anybody on loopback where it has none."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.bearer import require_key

_bearer = HTTPBearer(auto_error=False, scheme_name="rewardsKey", description="The service's key (`--key-file`)")


class RewardAccess:
    """Judges callers; a dependency of every route but the probes."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self.requirement: Any = Depends(self.require)
        """For `dependencies=` of a router."""

    def require(self, shown: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> None:
        """Raises UnauthenticatedError for a caller without the key."""
        credentials = "" if shown is None else shown.credentials
        require_key(credentials, self._key, "send `Authorization: Bearer` with the reward service's key")
