"""The table of docs/placement.md, cell by cell, as `rollmesh placement --fit` comes to it from a folder's config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.trainer.plan_cases import QWEN3
from services.config.load import load_settings
from services.host.devices import stated_devices
from services.wire.errors import UsageError
from trainer.planning.placing import propose_for

PAGE = Path(__file__).parents[3] / "docs" / "placement.md"
GPUS = ("1x80", "8x80", "2x8x80")
ROWS: dict[str, tuple[str, ...]] = {
    name: tuple(cells)
    for name, *cells in re.findall(
        r"^\| (Qwen3-\S+|Llama-\S+) \| (.+) \| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
}


CONFIGS = {name: QWEN3[name] for name in ROWS}


def test_the_table_has_fifteen_cells() -> None:
    assert list(ROWS) == ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B", "Llama-3-70B"]
    assert sum(len(cells) for cells in ROWS.values()) == 15


@pytest.mark.parametrize("name", CONFIGS)
def test_each_cell_is_what_the_command_proposes(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    settings = load_settings(None, ["model.dtype=bfloat16", "trainer.micro_batch_tokens=4096"])
    found = []
    for gpus in GPUS:
        try:
            proposal, _ = propose_for(settings, tmp_path, stated_devices(gpus, {}))
        except UsageError:
            found.append("refused")
            continue
        if proposal.placement.places[1].share is not None:
            found.append(f"shared, {proposal.engines} engine")
        else:
            ranks = proposal.trainer.options.layout.ranks
            found.append(f"trainer {ranks}, {proposal.engines} engines of {proposal.ranks}")
    assert tuple(found) == ROWS[name]
