"""Errors of staging, transport and manifest signatures. After any of them the old version is served on."""

from __future__ import annotations

from services.wire.errors import RollmeshError


class StageError(RollmeshError):
    """A version could not be staged: a bad hash, another layout, a source out of reach, a short read."""

    status = 409
    code = "stage_failed"


class TransportError(RollmeshError):
    """A transport could not be set up or could not move the bytes."""

    status = 502
    code = "transport"


class SignatureError(StageError):
    """A manifest does not bear the signature of the run's weight key."""

    status = 403
    code = "bad_signature"
