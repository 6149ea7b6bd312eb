"""What ranks publish and write is what one process does: one set of bytes, whoever holds which part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.policies.training.layout import Layout
from tests.support.model_families import make_family
from tests.support.published_by_ranks import checkpoint, digest, exported, held, restored
from tests.support.rank_pool import RankPool


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Qwen3-MoE"])
def test_ranks_publish_the_digest_of_one(rank_pool: RankPool, family: str, run_id: str) -> None:
    """Tied heads, heads of their own, experts that stand one by one in the folder."""
    alone = digest(0, {}, family, run_id)
    assert rank_pool.run(2, digest, {"data": 2}, family, run_id) == [alone] * 2
    assert rank_pool.run(4, digest, {"replicate": 2, "data": 2}, family, run_id) == [alone] * 4
    assert rank_pool.run(4, digest, {"tensor": 2, "context": 2}, family, run_id) == [alone] * 4


EXPERTS: list[dict[str, int]] = [
    {"data": 2, "expert": 2},
    {"tensor": 2, "expert": 2},
    {"data": 4, "expert": 2},
    {"replicate": 2, "data": 2, "expert": 2},
    {"data": 2, "context": 2, "expert": 2},
    {"data": 2, "tensor": 2, "expert": 2},
]


@pytest.mark.parametrize("family", ["Qwen3-MoE", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_ranks_that_split_experts_publish_the_digest_of_one(rank_pool: RankPool, family: str, run_id: str) -> None:
    """Experts one by one in the folder, and several in one tensor, with biases: these have no plan for tensor ranks."""
    alone = digest(0, {}, family, run_id)
    for layout in EXPERTS if family == "Qwen3-MoE" else [each for each in EXPERTS if "tensor" not in each]:
        ranks = Layout(**layout).ranks
        assert rank_pool.run(ranks, digest, layout, family, run_id) == [alone] * ranks, layout


def test_ranks_that_have_the_same_experts_share_their_weights(rank_pool: RankPool) -> None:
    (whole,) = {held(0, {}, "Qwen3-MoE")}
    for layout in ({"data": 4, "expert": 2}, {"data": 2, "context": 2, "expert": 2}, {"data": 4, "expert": 4}):
        assert rank_pool.run(4, held, layout, "Qwen3-MoE") == [whole // 4] * 4, layout


def test_a_checkpoint_of_ranks_that_split_experts_is_read_under_any_layout(
    rank_pool: RankPool, tmp_path: Path, run_id: str
) -> None:
    checkpoint(0, {}, "Qwen3-MoE", str(tmp_path / "one"))
    wanted = restored(0, {}, "Qwen3-MoE", str(tmp_path / "one"), run_id)
    for number, layout in enumerate([{"data": 4, "expert": 2}, {"data": 2, "tensor": 2, "expert": 2}]):
        folder = str(tmp_path / f"four-{number}")
        rank_pool.run(4, checkpoint, layout, "Qwen3-MoE", folder)
        assert restored(0, {}, "Qwen3-MoE", folder, run_id) == wanted
        for other in ({"data": 2}, {"data": 2, "expert": 2}, {"tensor": 2, "expert": 2}):
            assert rank_pool.run(2, restored, other, "Qwen3-MoE", folder, run_id) == [wanted] * 2, (layout, other)


def test_a_checkpoint_of_four_ranks_is_read_by_two_and_by_one(rank_pool: RankPool, tmp_path: Path, run_id: str) -> None:
    rank_pool.run(4, checkpoint, {"data": 4}, "Qwen3", str(tmp_path / "four"))
    checkpoint(0, {}, "Qwen3", str(tmp_path / "one"))
    wanted = restored(0, {}, "Qwen3", str(tmp_path / "one"), run_id)
    assert wanted[0] == 1 and wanted[1] != digest(0, {}, "Qwen3", run_id)
    assert rank_pool.run(2, restored, {"data": 2}, "Qwen3", str(tmp_path / "four"), run_id) == [wanted] * 2
    assert restored(0, {}, "Qwen3", str(tmp_path / "four"), run_id) == wanted
    assert rank_pool.run(2, restored, {"tensor": 2}, "Qwen3", str(tmp_path / "four"), run_id) == [wanted] * 2
    assert rank_pool.run(2, restored, {"data": 2}, "Qwen3", str(tmp_path / "one"), run_id) == [wanted] * 2


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2},
        pytest.param({"context": 2}, marks=pytest.mark.slow),
        {"tensor": 2},
        pytest.param({"replicate": 2, "data": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_with_adapters_publish_checkpoint_and_export_what_one_process_does(
    rank_pool: RankPool, layout: dict[str, int], tmp_path: Path, run_id: str
) -> None:
    """Merged weights for engines and in the last folder, byte for byte; adapters alone beside it, and in checkpoints."""
    base, ranks = tmp_path / "base", Layout(**layout).ranks
    make_family("Qwen3").save_pretrained(base)
    alone = exported(0, {}, str(base), 4, str(tmp_path / "alone"), run_id)
    assert alone != digest(0, {}, str(base), run_id)
    assert rank_pool.run(ranks, exported, layout, str(base), 4, str(tmp_path / "out"), run_id) == [alone] * ranks
    for file in ("final/model.safetensors", "final-adapter/adapter_model.safetensors"):
        assert_same_tensors(tmp_path / "out" / file, tmp_path / "alone" / file)
    assert digest(0, {}, str(tmp_path / "out/final"), run_id) == alone

    rank_pool.run(ranks, checkpoint, layout, str(base), str(tmp_path / "parts"), 4)
    assert restored(0, {}, str(base), str(tmp_path / "parts"), run_id, 4) == (1, alone)
    checkpoint(0, {}, str(base), str(tmp_path / "whole"), 4)
    again = rank_pool.run(ranks, restored, layout, str(base), str(tmp_path / "whole"), run_id, 4)
    assert again == [(1, alone)] * ranks


@pytest.mark.parametrize(
    ("family", "layout"), [("Gemma 3", {"data": 2}), ("Qwen3-MoE", {"data": 2, "expert": 2})], ids=str
)
def test_the_last_folder_of_ranks_holds_all_of_the_model(
    rank_pool: RankPool, family: str, layout: dict[str, int], tmp_path: Path, run_id: str
) -> None:
    """What is not trained, too: an encoder of images."""
    make_family(family).save_pretrained(tmp_path / "base")
    published = rank_pool.run(2, exported, layout, str(tmp_path / "base"), 0, str(tmp_path), run_id)
    exported(0, {}, str(tmp_path / "base"), 0, str(tmp_path / "alone"), run_id)
    assert_same_tensors(tmp_path / "final/model.safetensors", tmp_path / "alone/final/model.safetensors")
    assert [digest(0, {}, str(tmp_path / "final"), run_id)] * 2 == published


def assert_same_tensors(found: Path, wanted: Path) -> None:
    tensors, expected = load_file(found), load_file(wanted)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
