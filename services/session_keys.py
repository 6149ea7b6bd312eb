"""Session keys: what an agent shows to speak in one session and in no other.

    rs-<session id>-<HMAC-SHA256(run's secret, session id), 32 hex digits>

Nothing is stored for a key: whoever has the run's secret (every rollout server of it) can make and check it. Pure.
"""

from __future__ import annotations

import hmac

PREFIX = "rs-"
_MAC_DIGITS = 32


def secret_of_run(key: str, run_id: str) -> bytes:
    """What a run's session keys are made with where several runs share a session key: none opens another's sessions."""
    return hmac.digest(key.encode(), run_id.encode(), "sha256")


class SessionKeys:
    """Makes and reads the keys of one run."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def issue(self, session_id: str) -> str:
        return f"{PREFIX}{session_id}-{self._mac(session_id)}"

    def session_of(self, key: str) -> str | None:
        """The session that `key` opens; None for a key that nobody issued."""
        session_id, dash, mac = key.removeprefix(PREFIX).rpartition("-")
        if not key.startswith(PREFIX) or not dash:
            return None
        # Compared as bytes: a header may hold any character.
        return session_id if hmac.compare_digest(mac.encode(), self._mac(session_id).encode()) else None

    def _mac(self, session_id: str) -> str:
        return hmac.digest(self._secret, session_id.encode(), "sha256").hex()[:_MAC_DIGITS]
