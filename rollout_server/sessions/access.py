"""Authorization of agents' calls, and which session a call means.

| bearer            | opens                                                                                    |
|-------------------|------------------------------------------------------------------------------------------|
| a session's key   | the OpenAI API, status and heartbeat of that session, the list of models                 |
| the agent key     | every session, opening, rewarding and ending them                                        |
| admin, peer       | what `services.security.permissions` says; no session                                    |
| anything else     | everything where no key is configured (loopback only), nothing elsewhere                 |

A session is named by the URL (`/sessions/{id}/…`), by its key as bearer, or by the header `X-Session-ID`.
"""

from __future__ import annotations

from fastapi import Request

from services.http.auth import NOT_ISSUED, Authorizer, bearer
from services.security.keys import PREFIX, SessionKeys
from services.security.permissions import AuthScope
from services.wire.errors import ForbiddenError, UnauthenticatedError

SESSION_HEADER = "x-session-id"


class Access:
    """Judges the callers of one server: session keys itself, all others by its `Authorizer`."""

    def __init__(self, keys: SessionKeys, authorizer: Authorizer) -> None:
        self.keys = keys
        self._authorizer = authorizer

    def issued(self, key: str) -> bool:
        """Whether a session's key is one of this run's, of whatever session."""
        return self.keys.session_of(key) is not None

    def require_agent(self, request: Request, scope: AuthScope = "environment") -> None:
        """For what no session may do. Raises UnauthenticatedError, or ForbiddenError for a key of another scope."""
        if self._bearer_session(request, scope) is not None:
            raise ForbiddenError(
                "a session's key does not open this", "use the agent key: it is the environment's to do"
            )

    def require_any(self, request: Request) -> None:
        """For what every key opens, any session's too. Raises UnauthenticatedError."""
        self._bearer_session(request, "reading")

    def require_session(self, request: Request, named: str) -> None:
        """For what a session's own key may do too. Raises UnauthenticatedError or ForbiddenError."""
        own = self._bearer_session(request)
        if own is not None and own != named:
            raise ForbiddenError(f"this key opens another session than {named!r}", "use that session's own api_key")

    def find_session(self, request: Request, named: str | None, scope: AuthScope = "environment") -> str | None:
        """The session that the caller means: by the URL (`named`), its key or the header; None if by none of them.

        Raises UnauthenticatedError for a key that nobody issued, ForbiddenError for one that does not open `scope`, and
        where two ways name two sessions.
        """
        own = self._bearer_session(request, scope)
        named = named or request.headers.get(SESSION_HEADER)
        if own is not None and named is not None and own != named:
            raise ForbiddenError(f"this key opens another session than {named!r}", "use that session's own api_key")
        return own or named

    def _bearer_session(self, request: Request, scope: AuthScope = "environment") -> str | None:
        """The session whose key is shown; None for another key that opens `scope`."""
        shown = bearer(request.headers.get("authorization"))
        if shown.startswith(PREFIX):
            session_id = self.keys.session_of(shown)
            if session_id is None:
                raise UnauthenticatedError(*NOT_ISSUED)
            return session_id
        self._authorizer.require_key(shown, scope)
        return None
