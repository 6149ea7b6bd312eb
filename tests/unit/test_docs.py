"""The docs describe the knobs the code has: no more, no fewer."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from services.config.load import known_keys, load_settings
from services.run_store.keys import RunKeys

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


def test_configurations_of_the_data_are_understood(tmp_path: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/environments.md").read_text(), flags=re.M | re.S)
    assert blocks
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        load_settings(file, [])


def test_every_key_of_a_run_is_documented_with_its_bound() -> None:
    text = (ROOT / "docs" / "the-loop.md").read_text(encoding="utf-8").partition("## What a run keeps in Redis")[2]
    documented = set(re.findall(r"`([a-z-]+)[:`]", text.partition("\n## ")[0]))
    keys = RunKeys("r")
    names = {str(key).rpartition("}:")[2] for key in vars(keys).values() if str(key) != "r"}
    names |= {
        key.split(":")[2]
        for key in (keys.group_of("s"), keys.journal("g"), keys.partial("s", "c"), keys.undelivered("g"))
    }
    assert names | {keys.answer("g", "c").split(":")[2]} <= documented


def test_an_example_that_is_shown_whole_is_its_file() -> None:
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8").partition("This is all of [letters.py]")[2]
    shown = text.partition("```python\n")[2].partition("```")[0]
    file = (ROOT / "docs" / "examples" / "letters.py").read_text(encoding="utf-8")
    assert shown == file[file.index("from clients") :]


def test_the_pictures_of_the_live_view_are_what_their_script_draws(tmp_path: Path) -> None:
    images = ROOT / "docs" / "images"
    subprocess.run([sys.executable, images / "live_view.py", tmp_path], check=True, timeout=60)
    for name in ("live-view-80.svg", "live-view-160.svg"):
        drawn = (tmp_path / name).read_text(encoding="utf-8")
        assert drawn == (images / name).read_text(encoding="utf-8"), "python docs/images/live_view.py draws them anew"
        assert "@font-face" not in drawn


def test_the_agent_of_the_readme_plays_a_group_that_can_teach() -> None:
    snippet = (ROOT / "README.md").read_text(encoding="utf-8").partition("## An agent you already have")[2]
    size = re.search(r'"group_size": (\d+)', snippet)
    assert size is not None and int(size[1]) > 1, "the rewards of a group of one are compared with nothing"
    assert f"in range({size[1]})" in snippet


def test_relative_links_of_the_docs_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_that_orientation_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    paths = set(re.findall(r"`([\w.]+(?:/[\w.-]+)*/(?:[\w-]+\.\w+)?)`", text)) | set(
        re.findall(r"`(\w+/[\w./-]+)`", text)
    )
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_floors_that_the_architecture_samples_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = {
        contract["containers"][0]: [layer for layer in contract["layers"] if layer != "__main__"]
        for contract in contracts
        if "containers" in contract
    }
    lines = re.findall(r"^(\w+) +(\S.* → .*)$", (ROOT / "docs/architecture.md").read_text(), flags=re.MULTILINE)
    assert {package: floors.split(" → ") for package, floors in lines} == checked
