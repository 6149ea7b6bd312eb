"""The error answers that routes declare in the OpenAPI document; every one has the same body."""

from __future__ import annotations

from services.app import declared_errors

_MEANINGS = {
    400: "A prompt that is too long, or something that cannot be served",
    401: "No key, or one that nobody issued",
    403: "A key that does not open this",
    404: "Nothing of this name is here",
    409: "It has ended, is busy, or contradicts what happened before",
    410: "The session has expired, or the run has concluded",
    413: "A body that is too large",
    422: "A body or parameter that does not fit the schema",
    429: "No capacity: try again after Retry-After",
    503: "The server is starting, draining, or has lost something it needs",
    504: "A deadline has passed",
}

ERRORS = declared_errors(_MEANINGS)
