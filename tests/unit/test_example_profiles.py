"""The profiles of hypothesis that a command line may name."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("profile", ["dev", "ci", "nightly"])
def test_the_command_line_may_name_a_profile(profile: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "--co", "-q", __file__, f"--hypothesis-profile={profile}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_profile_that_there_is_none_of_is_refused() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "--co", "-q", __file__, "--hypothesis-profile=weekly"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "weekly" in ended.stdout + ended.stderr
