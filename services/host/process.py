"""The process: glibc's tunables for huge pages and non-temporal copies, quick imports of large libraries, free memory.

glibc reads GLIBC_TUNABLES once, when a process starts, so a process that needs other values executes itself again.

**Huge pages**, where the kernel's mode is `madvise`. Weights, vLLM's KV cache and a step's temporary tensors are read and
written faster from pages of 2 MB than of 4 KB (an engine on a CPU generates about a tenth more tokens a second). Memory of
which little is written is better left to small pages: one of 2 MB takes 2 ms to be there (`engines.torch.kv_cache` of the
rollout server).

**Non-temporal copies** of 1 MiB and more bypass the caches. A copy of weights is not read again soon, and takes a third
less time or better; a training step on a CPU takes a twentieth less with both (measured on Zen 3, docs/benchmarks.md).
glibc's own threshold is a guess from the cache size, and far too high in virtual machines (192 MB with a cache of 32 MB).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
STREAMED_BYTES = 1 << 20
STREAMED_COPIES = f"glibc.cpu.x86_non_temporal_threshold={STREAMED_BYTES:#x}"
_SINCE = (2, 35)
_OFFER = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def tunables_to_ask(environment: Mapping[str, str], c_library: str, machine: str, offer: str) -> str | None:
    """The value that GLIBC_TUNABLES needs; None where it is set already, or would have no effect.

    `c_library`: such as `glibc 2.36`. `machine`: such as `x86_64`. `offer`: the kernel's modes of huge pages, the active
    one in brackets: `always [madvise] never`. Tunables that the user has set are kept.
    """
    name, _, version = c_library.partition(" ")
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < _SINCE:
        return None
    wanted = [HUGE_PAGES] if "[madvise]" in offer else []
    wanted += [STREAMED_COPIES] if machine == "x86_64" else []
    said = environment.get(VARIABLE, "")
    missing = [ask for ask in wanted if ask.partition("=")[0] not in said]
    return ":".join([*([said] if said else []), *missing]) if missing else None


def missing_tunables() -> dict[str, str]:
    """What the environment variables lack for a process on this machine to have the tunables from its start."""
    try:
        c_library = os.confstr("CS_GNU_LIBC_VERSION") or ""
        offer = _OFFER.read_text() if _OFFER.exists() else ""
    except (AttributeError, ValueError, OSError):
        return {}
    asking = tunables_to_ask(os.environ, c_library, platform.machine(), offer)
    return {} if asking is None else {VARIABLE: asking}


def begin_again_with_tunables() -> None:
    """Execute this process again with the tunables, where they are not set yet: same process id, same command line.

    Call it before anything is open or running. Does nothing on systems without glibc.
    """
    if missing := missing_tunables():
        os.execve(sys.executable, sys.orig_argv, os.environ | missing)


def usable_core_numbers() -> list[int]:
    """Cores that this process may run on."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:
        return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(usable_core_numbers())


def give_memory_back() -> None:
    """Return what is free to the system, where glibc would keep it: a few ms. For after something large; not on a loop."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_bytes() -> int:
    """Bytes of memory that this machine, or this container, has."""
    import psutil

    found = int(psutil.virtual_memory().total)
    for limit in _LIMITS:
        with suppress(OSError, ValueError):
            found = min(found, int(limit.read_text()))
    return found


_LOUD = ("transformers",)
"""Libraries whose loggers have a handler of their own, with another format of lines."""


@contextmanager
def heavy_imports() -> Iterator[None]:
    """For imports of torch and other large libraries: no garbage collection inside the block, a fifth faster.

    Objects that exist at its end are frozen: a later full collection, which would stop a decode loop for tenths of a
    second, skips them. The libraries' logs go where all logs go (`services.observability.logging`).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        take_over_logs()


def take_over_logs() -> None:
    """Route the libraries' logs through the root logger; called once they are imported."""
    for name in _LOUD:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def collect_seldom() -> None:
    """Look for cyclic garbage far more seldom than Python would, and never again in what exists now.

    Each call of a busy service makes hundreds of objects that live until its answer, and hardly any cycle. At Python's own
    threshold, 700 objects, a rollout server spent a seventh of its event loop's time on looking through them, at 10,000 a
    fifteenth; at this one the objects of calls in flight seldom are enough. For the beginning of a process, and once more
    when it is set up and goes on for long.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


_SWITCH_INTERVAL_S = 0.0005


def take_turns() -> None:
    """Have the interpreter hand its lock over at most half a millisecond late, where several threads are to go on together.

    With the default of 5 ms, a decode step beside a busy event loop took 39 ms instead of 2, with this one 6; and a
    trainer's new version was announced 2 ms later than it could be.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))


def leave_quickly() -> None:
    """Call it last: a final garbage collection when the interpreter exits would take a second with torch loaded."""
    gc.freeze()
    gc.disable()
