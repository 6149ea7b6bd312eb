"""Server-sent events out of the pieces that a socket happens to give. Pure."""

from __future__ import annotations

from services.wire.errors import WireError

_LONGEST = 64 << 20
_END = b"[DONE]"


class EventReader:
    """Feed it pieces; it gives the data of each whole event. `ended`: the stream's last word was said."""

    def __init__(self) -> None:
        self._rest = b""
        self.ended = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes. Raises WireError for an event without an end."""
        *whole, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > _LONGEST:
            raise WireError(f"the engine sent {len(self._rest)} bytes without an end of an event")
        found = []
        for event in whole:
            # Comments keep a connection alive and say nothing.
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            data = b"\n".join(lines)
            if data == _END:
                self.ended = True
            elif data:
                found.append(data)
        return found
