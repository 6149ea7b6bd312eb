"""Who asks for huge pages, and that a process which does begins again with the allocator told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.huge_pages import VARIABLE, tunables_to_ask

OFFERED = "always [madvise] never\n"


@pytest.mark.parametrize(
    ("said", "c_library", "offer", "asked"),
    [
        ("", "glibc 2.36", OFFERED, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.tcache_count=0", "glibc 2.40", OFFERED, "glibc.malloc.tcache_count=0:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc 2.36", OFFERED, None),
        ("", "glibc 2.31", OFFERED, None),
        ("", "", OFFERED, None),
        ("", "glibc 2.36", "[always] madvise never\n", None),
        ("", "glibc 2.36", "always madvise [never]\n", None),
    ],
)
def test_huge_pages_are_asked_for_where_that_changes_something(
    said: str, c_library: str, offer: str, asked: str | None
) -> None:
    assert tunables_to_ask({VARIABLE: said} if said else {}, c_library, offer) == asked


def test_a_process_begins_again_once_with_its_own_command_line() -> None:
    script = (
        "import os, sys; from services import huge_pages\n"
        "print(os.getpid(), sys.argv[1:], sys.flags.safe_path, flush=True)\n"
        "huge_pages.begin_again_with_huge_pages(); print(os.environ.get('GLIBC_TUNABLES'))"
    )
    command = [sys.executable, "-P", "-c", script, "a b", "--c"]
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    *begun, said = done.stdout.splitlines()
    assert len(set(begun)) == 1, "the same process, the same arguments, the same flags"
    asked = tunables_to_ask(environment, *of_this_machine())
    assert said == str(asked)
    assert len(begun) == (1 if asked is None else 2)


def of_this_machine() -> tuple[str, str]:
    """The C library, and which huge pages the kernel offers; empty where there are none."""
    offer = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    c_library = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    return c_library or "", offer.read_text() if offer.exists() else ""
