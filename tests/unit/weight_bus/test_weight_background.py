"""Threads that stage weights leave decoding its cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

# A process of its own: how wide teams are is read from the environment when OpenMP is loaded.
_PROBE = """
import torch
from threadpoolctl import threadpool_info
from weight_bus.memory.throttle import background_threads

def wide() -> set[int]:
    torch.ones(1 << 20).add_(1.0)  # parallel work, at which torch sets a new thread's teams
    return {found["num_threads"] for found in threadpool_info() if found["user_api"] == "openmp"}

before = wide()
with background_threads("staging") as threads:
    print(threads.submit(wide).result() == {1}, wide() == before)
"""


def test_a_thread_that_stages_works_on_one_core_and_others_keep_theirs() -> None:
    environ = os.environ | {"OMP_NUM_THREADS": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=120, check=False, env=environ
    )
    assert ended.stdout.strip() == "True True", ended.stderr
