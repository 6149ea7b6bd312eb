"""What ranks publish and write is what one process does: one set of bytes, whoever holds which part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.published_by_ranks import checkpoint, digest, restored
from tests.support.rank_pool import RankPool


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Qwen3-MoE"])
def test_ranks_publish_the_digest_of_one(rank_pool: RankPool, family: str, run_id: str) -> None:
    """Tied heads, heads of their own, experts that stand one by one in the folder."""
    alone = digest(0, {}, family, run_id)
    assert rank_pool.run(2, digest, {"data": 2}, family, run_id) == [alone] * 2
    assert rank_pool.run(4, digest, {"replicate": 2, "data": 2}, family, run_id) == [alone] * 4
    assert rank_pool.run(4, digest, {"tensor": 2, "context": 2}, family, run_id) == [alone] * 4


def test_a_checkpoint_of_four_ranks_is_read_by_two_and_by_one(rank_pool: RankPool, tmp_path: Path, run_id: str) -> None:
    rank_pool.run(4, checkpoint, {"data": 4}, "Qwen3", str(tmp_path / "four"))
    checkpoint(0, {}, "Qwen3", str(tmp_path / "one"))
    wanted = restored(0, {}, "Qwen3", str(tmp_path / "one"), run_id)
    assert wanted[0] == 1 and wanted[1] != digest(0, {}, "Qwen3", run_id)
    assert rank_pool.run(2, restored, {"data": 2}, "Qwen3", str(tmp_path / "four"), run_id) == [wanted] * 2
    assert restored(0, {}, "Qwen3", str(tmp_path / "four"), run_id) == wanted
    assert rank_pool.run(2, restored, {"tensor": 2}, "Qwen3", str(tmp_path / "four"), run_id) == [wanted] * 2
    assert rank_pool.run(2, restored, {"data": 2}, "Qwen3", str(tmp_path / "one"), run_id) == [wanted] * 2
