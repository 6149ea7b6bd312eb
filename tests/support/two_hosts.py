"""Two hosts with a link between them, which can be cut: two Linux network namespaces joined by a pair of interfaces.

    "trainer"  10.78.N.1 ───────── veth ───────── 10.78.N.2  "engines"

Each has its own loopback, so what listens on 127.0.0.1 in one is not to be reached from the other. Needs root,
CAP_SYS_ADMIN and CAP_NET_ADMIN, and `ip`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

T = TypeVar("T")
Side = Literal["trainer", "engines"]
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 1 << 14, 1 << 19, 2


def why_not() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"rmprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here ({made.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


class TwoHosts:
    """Use it as a context manager: what it made is gone afterwards, whatever happened."""

    def __init__(self) -> None:
        tag = f"rm{os.getpid()}"
        self.spaces: dict[Side, str] = {"trainer": f"{tag}t", "engines": f"{tag}e"}
        self.links: dict[Side, str] = {"trainer": f"{tag}vt"[:15], "engines": f"{tag}ve"[:15]}
        net = f"10.78.{os.getpid() % 250}"
        self.addresses: dict[Side, str] = {"trainer": f"{net}.1", "engines": f"{net}.2"}
        self._threads: dict[Side, ThreadPoolExecutor] = {}

    def __enter__(self) -> TwoHosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._remove()

    def cut(self) -> None:
        """No packet passes any more, and nobody is told: connections stand still."""
        self._ip("trainer", "link", "set", self.links["trainer"], "down")

    def heal(self) -> None:
        self._ip("trainer", "link", "set", self.links["trainer"], "up")

    def path(self, side: Side) -> Path:
        """For `enter`."""
        return Path("/run/netns") / self.spaces[side]

    async def at(self, side: Side, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`, done on that host: on a thread there, in an event loop of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._thread(side), lambda: asyncio.run(_await(work)))

    def _thread(self, side: Side) -> ThreadPoolExecutor:
        if side not in self._threads:
            self._threads[side] = ThreadPoolExecutor(1, f"at-{side}", initializer=enter, initargs=(self.path(side),))
        return self._threads[side]

    def _make(self) -> None:
        for space in self.spaces.values():
            _run("ip", "netns", "add", space)
        ours, theirs = self.links["trainer"], self.links["engines"]
        # Made inside: the machine itself never has these interfaces.
        other = ("peer", "name", theirs, "netns", self.spaces["engines"])
        self._ip("trainer", "link", "add", ours, "type", "veth", *other)
        for side, address in self.addresses.items():
            self._ip(side, "address", "add", f"{address}/24", "dev", self.links[side])
            self._ip(side, "link", "set", self.links[side], "up")
            self._ip(side, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for space in self.spaces.values():
            # The pair of interfaces ends with the namespaces that they are in.
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _ip(self, side: Side, *arguments: str) -> None:
        _run("ip", "-n", self.spaces[side], *arguments)


def enter(namespace: Path) -> None:
    """This thread, and whatever it starts, is on that host from now on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open("rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: {namespace}")


def enter_and_run(namespace: Path, environment: dict[str, str], main: Callable[..., None], *arguments: object) -> None:
    """The main function of a process on that host, with these environment variables.

    It has a /sys of its own: UCX reads there which network devices there are.
    """
    enter(namespace)
    _see_its_devices()
    os.environ.update(environment)
    main(*arguments)


def _see_its_devices() -> None:
    """As `ip netns exec` does. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    asked = [
        lambda: libc.unshare(_CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None),
        lambda: libc.umount2(b"/sys", _MNT_DETACH),
        lambda: libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
    ]
    for call in asked:
        if call():
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


async def _await(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
