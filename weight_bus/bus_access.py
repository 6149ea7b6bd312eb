"""Who may operate the bus: whoever shows the admin key, and anybody on loopback where none is configured."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.bearer import require_key

_bearer = HTTPBearer(auto_error=False, scheme_name="adminKey", description="The bus's admin key (`--admin-key-file`)")


class BusAccess:
    """Judges callers; a dependency of every route under `/v1`."""

    def __init__(self, admin_key: str | None) -> None:
        self._admin_key = admin_key
        self.requirement: Any = Depends(self.require_admin)
        """For `dependencies=` of a router."""

    def require_admin(self, shown: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> None:
        """Raises UnauthenticatedError for a caller without the key."""
        credentials = "" if shown is None else shown.credentials
        require_key(credentials, self._admin_key, "send `Authorization: Bearer` with the bus's admin key")
