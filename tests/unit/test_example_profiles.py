"""The profiles of hypothesis that a command line may name."""

from __future__ import annotations

import subprocess
import sys


def test_the_command_line_may_name_a_profile() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "--co", "-q", __file__, "--hypothesis-profile=nightly"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
