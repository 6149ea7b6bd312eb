"""A call's own file system, in the worker's mount namespace: read-only views of what it may read, an own /proc, scratch.

/               empty and read-only but for what `files.View` shows
/proc           this worker's processes alone; read-only
/dev            null, zero, full, random, urandom
/.scratch       the one place to write: 64 MiB in memory, empty at each call; /tmp and /dev/shm lead there
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.rewards.sandbox import kernel
from services.rewards.sandbox.files import DEVICES, View

SCRATCH = Path("/.scratch")
SCRATCH_MIB = 64
_SCRATCH_FILES = 4096
_PLAIN = kernel.MS_NOSUID | kernel.MS_NODEV
_OLD = Path("/old")
_EMPTY = Path("/.empty")


class Scratch:
    """The folder that a call may write. Nothing of one call is there for the next."""

    def __init__(self) -> None:
        SCRATCH.mkdir()
        self._mount()

    def renew(self) -> None:
        """To be called when no process of a call is left."""
        if self._state() != self._empty:
            kernel.detach(str(SCRATCH))
            self._mount()

    def _mount(self) -> None:
        size = f"size={SCRATCH_MIB}m,nr_inodes={_SCRATCH_FILES},mode=700"
        kernel.mount("tmpfs", str(SCRATCH), "tmpfs", _PLAIN, size)
        self._empty = self._state()

    def _state(self) -> tuple[object, ...]:
        whole, folder = os.statvfs(SCRATCH), SCRATCH.stat()
        return whole.f_ffree, whole.f_bfree, folder.st_mode, folder.st_uid, folder.st_gid, tuple(os.listxattr(SCRATCH))


def separate_mounts() -> None:
    """What this process mounts from now on is seen by nobody outside of its mount namespace."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)


@dataclass(frozen=True)
class OwnFiles:
    """`proc`: a descriptor of a writable /proc of this PID namespace."""

    scratch: Scratch
    proc: int


def enter_view(view: View) -> OwnFiles:
    """Leave the file system for `view`. Raises OSError where the kernel refuses."""
    base = next(each for each in ("/tmp", "/mnt", "/usr") if Path(each).is_dir())
    kernel.mount("tmpfs", base, "tmpfs", _PLAIN, "size=4m,mode=755")
    os.chdir(base)
    Path("old").mkdir()
    kernel.pivot_root(".", "old")
    os.chdir("/")
    _EMPTY.touch(mode=0o444)
    for path in view.shown:
        _show(path)
        kernel.make_read_only(str(path))
    for device in DEVICES:
        _show(Path("/dev", device))
        kernel.make_read_only(f"/dev/{device}", devices=True)
    proc = _make_proc()
    for path in view.hidden:
        _cover(path)
    scratch = Scratch()
    _make_links(view)
    kernel.detach(str(_OLD))
    _OLD.rmdir()
    kernel.mount(None, "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _PLAIN)
    return OwnFiles(scratch, proc)


def _show(path: Path) -> None:
    source = _OLD / path.relative_to("/")
    if source.is_dir():
        path.mkdir(parents=True, exist_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    kernel.mount(str(source), str(path), None, kernel.MS_BIND | kernel.MS_REC)


def _make_proc() -> int:
    # Refused in a container whose engine masks parts of /proc.
    proc, flags = Path("/proc"), _PLAIN | kernel.MS_NOEXEC
    proc.mkdir()
    kernel.mount("proc", str(proc), "proc", flags)
    writable = os.open(proc, os.O_PATH | os.O_DIRECTORY)
    kernel.detach(str(proc))
    kernel.mount("proc", str(proc), "proc", flags | kernel.MS_RDONLY)
    return writable


def _cover(path: Path) -> None:
    if path.is_dir():
        kernel.mount("tmpfs", str(path), "tmpfs", _PLAIN | kernel.MS_RDONLY, "size=4k,mode=000")
    else:
        kernel.mount(str(_EMPTY), str(path), None, kernel.MS_BIND)
        kernel.make_read_only(str(path))


def _make_links(view: View) -> None:
    usual = {Path(each): SCRATCH for each in ("/tmp", "/var/tmp", "/dev/shm")}
    streams = {Path("/dev", name): Path("/proc/self/fd", rest) for name, rest in _STREAMS}
    for name, target in {**view.links, **streams, **usual}.items():
        # A name below something shown is there already, or may not be made.
        with suppress(OSError):
            name.parent.mkdir(parents=True, exist_ok=True)
            name.symlink_to(target)


_STREAMS = (("fd", ""), ("stdin", "0"), ("stdout", "1"), ("stderr", "2"))
