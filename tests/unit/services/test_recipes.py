"""Recipes: each file is whole and has a page, and each command of a page says settings that there are."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from services.config.load import load_settings
from services.config.recipes import find_recipe, recipes
from services.wire.errors import UsageError
from services.wire.tasks.name import parse_task
from trainer.algorithms.describe import describe

FLAGS = {"--engine", "--seed", "--steps", "--servers", "--k", "--task"}


def commands(page: Path) -> list[list[str]]:
    """`./dev up …` lines of a page's examples, as words."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [shlex.split(line.removeprefix("$ ./dev up")) for line in lines if line.startswith("$ ./dev up")]


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_a_whole_configuration_with_a_page(name: str) -> None:
    file = find_recipe(name)
    settings = load_settings(file, [])
    assert settings.model.path is not None or parse_task(settings.task).demonstrated
    assert file.with_suffix(".md").exists()
    assert describe(settings.trainer)


@pytest.mark.parametrize("name", recipes())
def test_the_commands_of_a_page_can_be_given(name: str) -> None:
    found = commands(find_recipe(name).with_suffix(".md"))
    assert ["--recipe", name] in [words[:2] for words in found]
    for words in found:
        assert words[0] == "--recipe"
        overrides, rest = [], iter(words[2:])
        for word in rest:
            assert "=" in word or word in FLAGS, word
            overrides.append(word if "=" in word else f"{word}={next(rest)}")
        describe(load_settings(find_recipe(words[1]), overrides).trainer)


def test_a_name_that_no_recipe_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no recipe 'smolm2'") as refused:
        find_recipe("smolm2")
    assert "did you mean 'smollm2'" in refused.value.remedy
