"""The docs describe the knobs the code has: no more, no fewer."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from services.config.load import known_keys, load_settings

ROOT = Path(__file__).parents[2]


def test_every_setting_is_documented_and_no_other() -> None:
    table = re.findall(r"^\| `([a-z_.0-9]+)` \|", (ROOT / "docs/configuration.md").read_text(), flags=re.MULTILINE)
    assert sorted(table) == sorted(known_keys())


@pytest.mark.parametrize("document", ["README.md", "docs/configuration.md", "docs/observability.md"])
def test_documented_command_lines_are_understood(document: str) -> None:
    """Every `rollmesh up` or `./dev up` line in the docs has overrides that the settings tree takes."""
    lines = re.findall(r"^\$ (?:rollmesh|\./dev) up(.*)$", (ROOT / document).read_text(), flags=re.MULTILINE)
    assert lines
    for line in lines:
        words = [word for word in shlex.split(line, comments=True) if "=" in word]
        load_settings(None, words)


def test_relative_links_of_the_docs_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
