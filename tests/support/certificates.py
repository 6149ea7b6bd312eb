"""Certificates for tests: real ones, by the authority of a mesh or by a stranger's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from services.security.certificates import LOOPBACK_NAMES, make_host, open_authority
from services.security.tls import Identity, Tls, read_tls


@dataclass(frozen=True)
class Certificates:
    """`ours`: what every process of the mesh is given; `strange`: the same of another mesh.

    `misplaced`: the folder of a host that is not this one, by our authority.
    """

    ours: Path
    strange: Path
    misplaced: Path

    @property
    def mesh(self) -> Tls:
        return read_tls(self.ours)

    @property
    def stranger(self) -> Tls:
        return read_tls(self.strange)

    def shown(self, folder: Path) -> Identity:
        """What a service with this folder shows."""
        identity = read_tls(folder).identity
        assert identity is not None
        return identity


def make_certificates(folder: Path) -> Certificates:
    ours, strange = open_authority(folder / "ours"), open_authority(folder / "strange")
    return Certificates(
        ours=make_host(folder / "ours", LOOPBACK_NAMES, ours)[0],
        strange=make_host(folder / "strange", LOOPBACK_NAMES, strange)[0],
        misplaced=make_host(folder / "ours", ["elsewhere.internal"], ours)[0],
    )


@asynccontextmanager
async def behind_tls(port: int, identity: Identity) -> AsyncIterator[int]:
    """A port that speaks TLS and passes what it hears on to a plain one of this machine, as stunnel does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=identity.context)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
