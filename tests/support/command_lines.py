"""Command lines of ours as files say them, judged by the parser that will read them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import typer

from services.cli import COMMANDS


def parse(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """`rollmesh COMMAND FLAGS…` → command, its parameters. Raises click's error for what the command does not take."""
    program, name, *flags = words
    assert program == "rollmesh"
    module, _, attribute = COMMANDS[name].target.partition(":")
    command = typer.main.get_command(getattr(importlib.import_module(module), attribute))
    context = command.make_context(name, list(flags))
    return name, dict(context.params)
