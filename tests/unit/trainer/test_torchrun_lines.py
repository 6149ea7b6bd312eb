"""Command lines of torchrun in the documentation: torchrun's own parser reads them, and the trainer's settings fit them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from services.config.checks import check_ranks, layout_asked
from services.config.load import load_settings
from services.policies.training.layout import Layout
from tests.support.command_lines import parse, torchrun_asks

PAGE = Path("docs/parallel.md")


def test_two_machines_of_the_page_make_the_layout_that_it_says() -> None:
    said = PAGE.read_text(encoding="utf-8")
    command = re.search(r"^\$ (torchrun .+?)(?<!\\)\n", said, re.DOTALL | re.MULTILINE)
    settings = re.search(r"trainer\.parallel\.replicate = (\d+)", said)
    assert command is not None and settings is not None
    asked = torchrun_asks(shlex.split(command[1].replace("\\\n", " ")))
    assert (asked.node, asked.master, parse(["rollmesh", *asked.command])[0]) == (0, "node0", "train")
    resolved = load_settings(None, [f"trainer.parallel.replicate={settings[1]}"])
    layout = layout_asked(resolved.trainer.parallel, asked.ranks)
    check_ranks(resolved, layout)
    assert layout == Layout(replicate=2, data=8)
