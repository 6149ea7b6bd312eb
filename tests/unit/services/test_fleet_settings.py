"""Runs that cannot share a rollout server are refused by the name of the run and the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.fleet import RunOptions, check_fleet, run_beside
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
        (
            "vllm",
            ["rollout.vllm.max_model_len=64"],
            r"rollout.vllm=\{'max_model_len': 64\}, and run a, .* \{\}",
        ),
        ("vllm", ["weights.transport=shm"], "weights.transport=shm"),
    ],
)
def test_runs_that_cannot_are_refused_by_name(engine: str, other: list[str], complaint: str) -> None:
    runs = {"a": load_settings(None, ADAPTERS), "b": load_settings(None, [*ADAPTERS, *other])}
    with pytest.raises(UsageError, match=complaint):
        check_fleet(runs, engine)


FIRST = RunOptions("a", 8100, "redis://127.0.0.1/0", Path("a.toml"), "http://127.0.0.1:8200", keys_dir=Path("keys"))


def test_a_further_run_has_what_it_names_and_the_first_ones_redis_and_keys() -> None:
    named = run_beside("run-id=b,port=8101,config=runs/b/config.toml,bus-url=http://127.0.0.1:8210", FIRST)
    expected = RunOptions(
        "b",
        8101,
        "redis://127.0.0.1/0",
        Path("runs/b/config.toml"),
        "http://127.0.0.1:8210",
        keys_dir=Path("keys"),
    )
    assert named == expected
    assert run_beside("run-id=b,port=8101,config=b.toml", FIRST).bus_url is None
    assert run_beside("run-id=b,port=8101,config=b.toml,keys-dir=other", FIRST).keys_dir == Path("other")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("run-id=b,port=8101", "which config"),
        ("run-id=b,config=b.toml", "which port"),
        ("run-id=b,port=high,config=b.toml", "port=high is no port"),
        ("run-id=b,port=8101,config=b.toml,engine=torch", "no option 'engine'"),
        ("run-id=b,port=8101,config=", "config has no value"),
        ("run-id=b,run-id=c,port=8101,config=b.toml", "run-id comes twice"),
        ("", "no option ''"),
    ],
)
def test_a_further_run_that_is_not_whole_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        run_beside(text, FIRST)
