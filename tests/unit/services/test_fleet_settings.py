"""Runs that cannot share a rollout server are refused by the name of the run and the setting."""

from __future__ import annotations

import pytest

from services.config.fleet import check_fleet
from services.config.load import load_settings
from services.wire.errors import UsageError

ADAPTERS = ["weights.publish=adapter", "trainer.lora.rank=4", "model.path=base"]


def test_runs_that_differ_in_their_adapters_share_a_server() -> None:
    wide = [*ADAPTERS, "trainer.lora.rank=16", 'trainer.lora.targets=["q_proj"]', "rollout.max_running=3", "seed=9"]
    check_fleet({"a": load_settings(None, ADAPTERS), "b": load_settings(None, wide)}, "vllm")


@pytest.mark.parametrize(
    ("engine", "other", "complaint"),
    [
        ("torch", [], "engine torch serves one run, and 2 are named"),
        ("http", [], "engine http serves one run"),
        ("vllm", ["weights.publish=merged"], "run b has weights.publish=merged"),
        ("vllm", ["model.path=elsewhere"], "run b has model.path=elsewhere, and run a, on the same server, base"),
        ("vllm", ["model.dtype=bfloat16"], "model.dtype=bfloat16"),
        ("vllm", ["rollout.kv_policy=keep"], "rollout.kv_policy=keep"),
        ("vllm", ["rollout.vllm.max_model_len=64"], "rollout.vllm"),
        ("vllm", ["weights.transport=shm"], "weights.transport=shm"),
    ],
)
def test_runs_that_cannot_are_refused_by_name(engine: str, other: list[str], complaint: str) -> None:
    runs = {"a": load_settings(None, ADAPTERS), "b": load_settings(None, [*ADAPTERS, *other])}
    with pytest.raises(UsageError, match=complaint):
        check_fleet(runs, engine)
