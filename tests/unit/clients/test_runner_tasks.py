"""What a runner is told to play: a task, or a run's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.runner.cli import _asked
from services.policies.training.curriculum import CurriculumRules
from services.wire.errors import UsageError

TWO = """
[[tasks]]
task = "running-sums"
[[tasks]]
task = "guess-number"
max_tokens = 7
[curriculum]
enabled = true
"""


def test_a_configuration_says_tasks_and_curriculum(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TWO)
    tasks, curriculum = _asked(None, file)
    assert [(each.task, each.max_tokens) for each in tasks] == [("running-sums", None), ("guess-number", 7)]
    assert curriculum == CurriculumRules()
    tasks, curriculum = _asked("sums", None)
    assert [each.task for each in tasks] == ["sums"] and curriculum is None


@pytest.mark.parametrize("given", [(None, None), ("sums", Path("run.toml"))])
def test_neither_or_both_is_refused(given: tuple[str | None, Path | None]) -> None:
    with pytest.raises(UsageError, match="exactly one of --task and --config"):
        _asked(*given)
