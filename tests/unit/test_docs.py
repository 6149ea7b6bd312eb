"""The docs describe the knobs the code has: no more, no fewer."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer
from typer.core import TyperGroup, TyperOption

from docs.build import build, pages_of_site
from docs.reference_pages import references
from services.cli import COMMANDS, Dispatcher, in_one_style
from services.config.load import known_keys, load_settings
from services.run_store.keys import RunKeys

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("recipes/*.md")),
]


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


def test_settings_that_pages_for_beginners_name_exist() -> None:
    known = set(known_keys())
    sections = {key.rpartition(".")[0] for key in known} - {""}
    for page in [
        *ROOT.glob("docs/tutorials/*.md"),
        *(ROOT / f"docs/{name}.md" for name in ("troubleshooting", "lora", "memory")),
    ]:
        named = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?: ?=[^`]*)?`", page.read_text(encoding="utf-8"))
        settings = {key for key in named if key.rpartition(".")[0] in sections}
        assert settings <= known | sections, page.name


def test_every_key_of_a_run_is_documented_with_its_bound() -> None:
    text = (ROOT / "docs" / "the-loop.md").read_text(encoding="utf-8").partition("## What a run keeps in Redis")[2]
    documented = set(re.findall(r"`([a-z-]+)[:`]", text.partition("\n## ")[0]))
    keys = RunKeys("r")
    names = {str(key).rpartition("}:")[2] for key in vars(keys).values() if str(key) != "r"}
    names |= {
        key.split(":")[2]
        for key in (
            keys.group_of("s"),
            keys.journal("g"),
            keys.partial("s", "c"),
            keys.undelivered("g"),
            keys.blob("t"),
        )
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


def test_pages_made_from_the_code_are_as_the_code_is() -> None:
    for path, text in references().items():
        assert path.read_text(encoding="utf-8") == text, f"run ./dev docs, which writes {path.name} anew"


def test_every_command_line_names_commands_and_options_that_exist() -> None:
    lines = list(_command_lines())
    assert len(lines) > 100
    assert [f"{page.name}: {line}: {wrong}" for page, line in lines if (wrong := _wrong_word(line))] == []


def test_code_in_the_docs_is_python_and_toml() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S):
            ast.parse(block, filename=page.name)
        for block in re.findall(r"^```toml\n(.*?)^```", text, flags=re.M | re.S):
            tomllib.loads(block)


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    assert pages_of_site() == {str(page.relative_to(ROOT)) for page in PAGES} | {"CHANGELOG.md"}
    site = tmp_path / "site"
    build(site)
    read = {path: _Page(path) for path in site.rglob("*.html")}
    assert len(read) > len(PAGES)
    for path, page in read.items():
        assert [url for url in page.loaded if urlsplit(url).netloc] == [], path.name
        if path.name != "404.html":  # it is shown at any address
            assert [link for link in page.links if not _leads_somewhere(link, path, read)] == [], path.name


def _leads_somewhere(link: str, path: Path, read: Mapping[Path, _Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    return target.exists() and (not parts.fragment or unquote(parts.fragment) in read[target].ids)


class _Page(HTMLParser):
    """What a page loads (scripts, styles, images), where it links to, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe") and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon"):
            self.loaded.append(given["href"])


def _command_lines() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^\$ (?:rollmesh|\./dev) (.+)$", text, flags=re.MULTILINE):
            yield page, line


def _wrong_word(line: str) -> str | None:
    """The command or option of a line that does not exist."""
    words = shlex.split(re.split(r" [|&;>]", line)[0], comments=True)
    name, *rest = words
    jobs = re.findall(r"^  ([a-z]+)\)$", (ROOT / "dev").read_text(), flags=re.MULTILINE)
    if name not in COMMANDS:
        return None if name in jobs or name.startswith("-") else name
    module, _, attribute = COMMANDS[name].target.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, Dispatcher):
        return None
    command = in_one_style(typer.main.get_command(target))
    options = {"-h", "--help"}
    while True:
        options |= {each for option in command.params if isinstance(option, TyperOption) for each in option.opts}
        options |= {
            each for option in command.params if isinstance(option, TyperOption) for each in option.secondary_opts
        }
        if not (isinstance(command, TyperGroup) and rest and rest[0] in command.commands):
            break
        command, rest = in_one_style(command.commands[rest[0]]), rest[1:]
    passes_on = COMMANDS[name].target.endswith("vllm_app")  # the flags of vLLM's own server may follow
    given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return None if passes_on else next((word for word in given if word not in options), None)


def test_relative_links_of_the_docs_lead_somewhere() -> None:
    for document in [*PAGES, ROOT / "CHANGELOG.md"]:
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
