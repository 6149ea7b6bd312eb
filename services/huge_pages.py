"""A process's memory in huge pages, where the system gives them only to who asks for them.

Weights, keys and values, and what a step allocates and frees again, are read and written faster from pages of 2 MB than
from those of 4 KB (an engine on a CPU draws about a tenth more tokens a second). glibc's allocator asks for them if
GLIBC_TUNABLES says so, and reads that once, when a process begins: so a process that wants them begins again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.hugetlb"
_ASK = f"{_TUNABLE}=1"
_SINCE = (2, 35)
_OFFER = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def tunables_to_ask(environment: Mapping[str, str], c_library: str, offer: str) -> str | None:
    """What GLIBC_TUNABLES must be for huge pages; None where it asks already, or asking would change nothing.

    `c_library`: as `glibc 2.36`. `offer`: what the kernel says, the choice in brackets: `always [madvise] never`. A user's
    own choice of this tunable stands.
    """
    name, _, version = c_library.partition(" ")
    if name != "glibc" or "[madvise]" not in offer:
        return None
    if tuple(int(part) for part in version.split(".")[:2]) < _SINCE:
        return None
    said = environment.get(VARIABLE, "")
    if _TUNABLE in said:
        return None
    return f"{said}:{_ASK}" if said else _ASK


def begin_again_with_huge_pages() -> None:
    """Replace this process by itself with the allocator told, unless it was or cannot be: same id, same command line.

    Call it before anything is open or running. Does nothing on systems without glibc or without such pages.
    """
    try:
        c_library, offer = os.confstr("CS_GNU_LIBC_VERSION") or "", _OFFER.read_text()
    except (AttributeError, ValueError, OSError):
        return
    asking = tunables_to_ask(os.environ, c_library, offer)
    if asking is not None:
        os.execve(sys.executable, sys.orig_argv, os.environ | {VARIABLE: asking})
