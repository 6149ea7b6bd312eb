"""A model folder that several ranks load, a part each: what they have is what one process has that loads all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.policies.training.layout import Layout
from services.wire.errors import UsageError
from tests.support.loaded_by_ranks import differences, most_resident
from tests.support.model_families import FAMILIES, make_family
from tests.support.rank_pool import RankPool
from trainer.checkpoint.model_folder import load_policy
from trainer.checkpoint.shared_folder import SharedFolder
from trainer.model.learner import named_weights
from trainer.sft.tiny_model import build_model

MIB = 1 << 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By family: a folder of several files, in bfloat16."""
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family.replace(" ", "-").replace(",", ""))
        make_family(family).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        made[family] = str(folder)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_that_reads_by_parts_has_all_of_it(folders: dict[str, str], family: str) -> None:
    shared, whole = SharedFolder(Path(folders[family])), load_policy(Path(folders[family]))
    model = shared.empty()
    assert all(parameter.is_meta for parameter in model.parameters())
    shared.fill(model, torch.device("cpu"))
    found, wanted = named_weights(model), named_weights(whole)
    assert found.keys() == wanted.keys()
    for name, tensor in {**wanted, **dict(whole.named_buffers())}.items():
        assert torch.equal({**found, **dict(model.named_buffers())}[name], tensor), name


EVERY = {"advantage": {"estimator": "gae"}, "loss": {"kl": 0.1}}


@pytest.mark.parametrize(
    ("layout", "trainer", "families"),
    [
        # Of 32 rows and 64 no rank has as many as the others.
        ({"data": 3}, EVERY, ["Qwen3", "Qwen3-MoE", "gpt-oss", "Gemma 3"]),
        ({"data": 2}, {"lora": {"rank": 4}}, ["Qwen3"]),
        pytest.param(
            {"data": 2, "tensor": 2}, {"loss": {"kl": 0.1}}, ["Qwen3", "Qwen3-MoE", "Llama"], marks=pytest.mark.slow
        ),
        ({"replicate": 2, "context": 2}, EVERY, ["Qwen3"]),
        pytest.param({"data": 4, "expert": 2}, {"loss": {"kl": 0.1}}, ["Qwen3-MoE"], marks=pytest.mark.slow),
        ({"data": 2, "tensor": 2, "expert": 2}, {}, ["Qwen3-MoE"]),
    ],
)
def test_each_model_of_a_run_is_what_one_process_loads(
    rank_pool: RankPool,
    folders: dict[str, str],
    layout: dict[str, int],
    trainer: dict[str, object],
    families: list[str],
) -> None:
    size = Layout(**layout).ranks
    found = rank_pool.run(size, differences, layout, trainer, [folders[family] for family in families])
    assert found == [[]] * size


def test_no_rank_takes_more_than_its_part_for_loading(rank_pool: RankPool, tmp_path: Path) -> None:
    """Of 200 MiB: half, and the files' pages that are read meanwhile."""
    for name, sizes in (("small", {"hidden_size": 32}), ("large", {"hidden_size": 512, "vocabulary": 40_000})):
        build_model(1, layers=4, **sizes).save_pretrained(tmp_path / name, max_shard_size="80MB")
    for part, taken in rank_pool.run(2, most_resident, {"data": 2}, str(tmp_path / "large"), str(tmp_path / "small")):
        assert 85 * MIB < part < 110 * MIB and taken < part + 32 * MIB, f"{taken / MIB:.0f} of {part / MIB:.0f} MiB"


def test_a_folder_that_lacks_a_weight_is_refused(folders: dict[str, str]) -> None:
    folder = Path(folders["Llama"])
    (path,) = [path for path in folder.glob("*.safetensors") if "model.norm.weight" in load_file(path)]
    tensors = load_file(path)
    for wrong, has in ({}, "no such tensor"), ({"model.norm.weight": torch.ones(31)}, r"one of \[31\]"):
        save_file({**{k: v for k, v in tensors.items() if k != "model.norm.weight"}, **wrong}, path, {"format": "pt"})
        shared = SharedFolder(folder)
        with pytest.raises(UsageError, match=rf"model.norm.weight \[32\], and .* has {has}"):
            shared.fill(shared.empty(), torch.device("cpu"))
    save_file(tensors, path, {"format": "pt"})


def test_what_cannot_be_read_in_parts_says_why(tmp_path: Path) -> None:
    build_model(1, hidden_size=32, layers=1).config.save_pretrained(tmp_path)
    assert SharedFolder(tmp_path).why_whole == "it has no safetensors files"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert SharedFolder(tmp_path).why_whole == "its weights are quantised"
