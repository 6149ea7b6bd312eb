"""The table of docs/placement.md, cell by cell, as `rollmesh placement --fit` comes to it from a folder's config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

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


def config(
    kind: str, hidden: int, layers: int, heads: tuple[int, int], feed_forward: int, vocabulary: int
) -> dict[str, object]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32_768,
    }


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": []}
CONFIGS = {
    "Qwen3-0.6B": config("qwen3", 1024, 28, (16, 8), 3072, 151_936) | {"tie_word_embeddings": True},
    "Qwen3-8B": config("qwen3", 4096, 36, (32, 8), 12_288, 151_936),
    "Qwen3-32B": config("qwen3", 5120, 64, (64, 8), 25_600, 151_936),
    "Qwen3-30B-A3B": config("qwen3_moe", 2048, 48, (32, 4), 6144, 151_936) | EXPERTS,
    "Llama-3-70B": config("llama", 8192, 80, (64, 8), 28_672, 128_256),
}


def test_the_table_has_fifteen_cells() -> None:
    assert list(ROWS) == list(CONFIGS)
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
