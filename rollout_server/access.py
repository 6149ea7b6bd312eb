"""Who is calling, and which session is meant.

| bearer            | opens                                                                                    |
|-------------------|------------------------------------------------------------------------------------------|
| a session's key   | the OpenAI dialect, status and heartbeat of that session; nothing else                     |
| the agent key     | every session, opening, rewarding and ending them                                        |
| anything else     | the same as the agent key where none is configured (loopback only), nothing elsewhere     |

A session is named by the URL (`/sessions/{id}/…`), by its key as bearer, or by the header `X-Session-ID`.
"""

from __future__ import annotations

from fastapi import Request

from services.bearer import bearer, require_key
from services.session_keys import PREFIX, SessionKeys
from services.wire.errors import ForbiddenError, UnauthenticatedError

SESSION_HEADER = "x-session-id"


class Access:
    """Judges the callers of one server. `agent_key`: None where every caller on loopback may do what an agent may."""

    def __init__(self, keys: SessionKeys, agent_key: str | None) -> None:
        self.keys = keys
        self._agent_key = agent_key

    def require_agent(self, request: Request) -> None:
        """For what belongs to the environment. Raises UnauthenticatedError, or ForbiddenError for a session's key."""
        if self._bearer_session(request) is not None:
            raise ForbiddenError(
                "a session's key does not open this", "use the agent key: it is the environment's to do"
            )

    def require_session(self, request: Request, named: str) -> None:
        """For what a session's own key may do too. Raises UnauthenticatedError or ForbiddenError."""
        own = self._bearer_session(request)
        if own is not None and own != named:
            raise ForbiddenError(f"this key opens another session than {named!r}", "use that session's own api_key")

    def find_session(self, request: Request, named: str | None) -> str | None:
        """The session that the caller means: by the URL (`named`), its key or the header; None if by none of them.

        Raises UnauthenticatedError for a key that nobody issued, ForbiddenError where two ways name two sessions.
        """
        own = self._bearer_session(request)
        named = named or request.headers.get(SESSION_HEADER)
        if own is not None and named is not None and own != named:
            raise ForbiddenError(f"this key opens another session than {named!r}", "use that session's own api_key")
        return own or named

    def _bearer_session(self, request: Request) -> str | None:
        """The session whose key is shown; None for whoever may do all that an agent may."""
        shown = bearer(request.headers.get("authorization"))
        if shown.startswith(PREFIX):
            session_id = self.keys.session_of(shown)
            if session_id is None:
                raise UnauthenticatedError(
                    "this session key is not one of this run", "use the api_key of POST /sessions"
                )
            return session_id
        require_key(shown, self._agent_key, "send `Authorization: Bearer` with the agent key or a session's")
        return None
