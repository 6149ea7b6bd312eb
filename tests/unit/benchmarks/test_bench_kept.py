"""`./dev bench kept`: a tiny run has all keys, and is found."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.kept.run import KeptBench


def test_a_tiny_run_tells_all_figures() -> None:
    command = [sys.executable, "-m", "benchmarks", "kept", "--steps", "20", "--rollouts", "3", "--asked", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.keys() == set(KeptBench.__struct_fields__)
    assert told["rollouts"] == 60 and told["keeping_cpu_ms"] > 0.0
    assert len(told["questions"]) == 11
    assert told["slowest_question_ms"] == max(each["slowest_ms"] for each in told["questions"])
