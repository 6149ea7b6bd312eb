"""Free ports that stay ours: reserved for the whole run, so that neither another run nor a connection takes them.

On Linux a port that is bound (not listened on) with SO_REUSEADDR can be bound and listened on by our child, which sets
it too, and by nobody else; it also survives the restart of a service. Other systems refuse the child while the
reservation stands, so there it is given up just before the start.
"""

from __future__ import annotations

import socket
import sys
from types import TracebackType

LOOPBACK = "127.0.0.1"


class PortReservation:
    """Ports on loopback, held until the context ends."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def reserve(self) -> int:
        """A port that nobody uses."""
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Bound without the option: the kernel then picks a port that no one else has any claim to.
        holder.bind((LOOPBACK, 0))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(holder.getsockname()[1])
        if sys.platform == "linux":
            self._held.append(holder)
        else:
            holder.close()
        return port

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for holder in self._held:
            holder.close()
