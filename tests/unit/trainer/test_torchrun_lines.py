"""Command lines of torchrun in the documentation: torchrun's own parser reads them, and the trainer's settings fit them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from torch.distributed.run import get_args_parser

from services.config.checks import check_ranks, layout_asked
from services.config.load import load_settings
from services.policies.training.layout import Layout

PAGE = Path("docs/parallel.md")


def test_two_machines_of_the_page_make_the_layout_that_it_says(tmp_path: Path) -> None:
    said = PAGE.read_text(encoding="utf-8")
    command = re.search(r"^\$ torchrun (.+?)(?<!\\)\n", said, re.DOTALL | re.MULTILINE)
    settings = re.search(r"trainer\.parallel\.replicate = (\d+)", said)
    assert command is not None and settings is not None
    asked = get_args_parser().parse_args(shlex.split(command[1].replace("\\\n", " ")))
    assert (asked.module, asked.training_script, asked.training_script_args[0]) == (True, "services", "train")
    (tmp_path / "run.toml").write_text(f"[trainer.parallel]\nreplicate = {settings[1]}\n")
    resolved = load_settings(tmp_path / "run.toml", [])
    layout = layout_asked(resolved.trainer.parallel, int(asked.nnodes) * int(asked.nproc_per_node))
    check_ranks(resolved, layout)
    assert layout == Layout(replicate=2, data=8)
