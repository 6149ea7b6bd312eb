"""Who asks glibc for what, and that a process which does begins again with it told."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.host.process import HUGE_PAGES, STREAMED_COPIES, VARIABLE, tunables_to_ask

ROOT = Path(__file__).resolve().parents[3]
OFFERED = "always [madvise] never\n"
BOTH = f"{HUGE_PAGES}:{STREAMED_COPIES}"


@pytest.mark.parametrize(
    ("said", "c_library", "machine", "offer", "asked"),
    [
        ("", "glibc 2.36", "x86_64", OFFERED, BOTH),
        ("glibc.malloc.tcache_count=0", "glibc 2.40", "x86_64", OFFERED, f"glibc.malloc.tcache_count=0:{BOTH}"),
        ("glibc.malloc.hugetlb=0", "glibc 2.36", "x86_64", OFFERED, f"glibc.malloc.hugetlb=0:{STREAMED_COPIES}"),
        (BOTH, "glibc 2.36", "x86_64", OFFERED, None),
        ("", "glibc 2.31", "x86_64", OFFERED, None),
        ("", "", "x86_64", OFFERED, None),
        ("", "glibc 2.36", "x86_64", "[always] madvise never\n", STREAMED_COPIES),
        ("", "glibc 2.36", "x86_64", "", STREAMED_COPIES),
        ("", "glibc 2.36", "aarch64", OFFERED, HUGE_PAGES),
        ("", "glibc 2.36", "aarch64", "always madvise [never]\n", None),
    ],
)
def test_glibc_is_asked_where_that_changes_something(
    said: str, c_library: str, machine: str, offer: str, asked: str | None
) -> None:
    environment = {VARIABLE: said} if said else {}
    assert tunables_to_ask(environment, c_library, machine, offer) == asked


def test_containers_are_told_the_same() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    for service in ("rollout", "trainer"):
        assert compose["services"][service]["environment"][VARIABLE] == BOTH


def test_a_process_begins_again_once_with_its_own_command_line() -> None:
    script = (
        "import os, sys; from services.host import process\n"
        "print(os.getpid(), sys.argv[1:], sys.flags.safe_path, flush=True)\n"
        "process.begin_again_with_tunables(); print(os.environ.get('GLIBC_TUNABLES'))"
    )
    command = [sys.executable, "-P", "-c", script, "a b", "--c"]
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    *begun, said = done.stdout.splitlines()
    assert len(set(begun)) == 1, "the same process, the same arguments, the same flags"
    offer = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    c_library = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    asked = tunables_to_ask(
        environment, c_library or "", platform.machine(), offer.read_text() if offer.exists() else ""
    )
    assert said == str(asked)
    assert len(begun) == (1 if asked is None else 2)
