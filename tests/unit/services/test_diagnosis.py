"""Findings from facts: each planted fault alone, and facts of what is well."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from services.config.model_folder import read_model_files
from services.policies.balance import Counted
from services.policies.diagnosis.environment import of_dialects, of_trial
from services.policies.diagnosis.finding import Finding
from services.policies.diagnosis.fleet import Sampling, of_account, of_events, of_stragglers, of_weights, stragglers
from services.policies.diagnosis.logs import of_interrupted, of_logs
from services.policies.diagnosis.machine import (
    HostLoad,
    Package,
    TorchBuild,
    Transport,
    of_disk,
    of_packages,
    of_torch,
    of_transport,
    of_unended,
)
from services.policies.diagnosis.mesh import of_causes, of_unread
from services.policies.diagnosis.plan import ModelFiles, least_host_bytes, of_characters, of_memory, of_model
from services.policies.diagnosis.store import StoreFacts, of_clocks, of_store
from services.policies.diagnosis.training import of_steps
from services.policies.training.health import signs
from services.policies.training.memory import MemoryOptions
from services.policies.training.model_shape import ModelShape
from services.policies.wait_causes import Cause
from services.wire.run_metrics import StepMetrics
from services.wire.tasks.trial import TaskTrial
from services.wire.weights_api import EngineDigest, VerifyView, WeightEvent
from tests.support.step_lines import step_metrics

MIB = 1 << 20
NOW = time.time()


def ids(found: Sequence[Finding]) -> list[str]:
    return [each.id for each in found]


def only(found: Sequence[Finding]) -> Finding:
    (one,) = found
    assert one.cause and one.evidence and one.remedy
    return one


def test_a_package_outside_its_range_is_named_with_the_range() -> None:
    fits = Package("redis", "7.1", ">=7,<9", "rollmesh", True)
    wrong = Package("torch", "2.10.0", ">=2.13,<2.14", "rollmesh", False)
    found = only(list(of_packages([fits, wrong])))
    assert (found.id, found.remedy) == ("versions", "pip install 'torch>=2.13,<2.14'")


def test_a_torch_that_cannot_use_the_gpus_is_named() -> None:
    cpu, new = TorchBuild("2.13.0+cpu", None, None), TorchBuild("2.13.0", (13, 0), (12, 4))
    assert "built for CPUs" in only(list(of_torch(cpu, 2))).cause
    assert "driver runs CUDA 12.4" in only(list(of_torch(new, 1))).evidence
    for torch, gpus in (
        (cpu, 0),
        (None, 1),
        (replace(new, driver_cuda=(13, 1)), 1),
        (replace(new, driver_cuda=None), 1),
    ):
        assert list(of_torch(torch, gpus)) == []


def test_a_disk_that_is_nearly_full_is_named_with_what_is_left() -> None:
    assert "12 MiB are left" in only(list(of_disk("/runs", 12 * MIB, 256 * MIB))).evidence
    assert list(of_disk("/runs", 300 * MIB, 256 * MIB)) == []


def test_a_transport_that_fails_or_is_slow_is_named_with_its_bandwidth() -> None:
    failed, slow, good = (
        Transport("nixl", why="no transport"),
        Transport("nixl", 5e7, MIB),
        Transport("nixl", 2.5e9, MIB),
    )
    assert only(list(of_transport(failed))).id == "nixl-unusable"
    assert "0.05 GB/s" in only(list(of_transport(slow))).evidence
    assert list(of_transport(good)) == []


def test_a_machine_is_busy_where_more_processes_want_to_run_than_it_has_cores_for() -> None:
    assert not HostLoad(2.9, 2).busy
    busy = HostLoad(3.1, 2)
    assert busy.busy
    found = of_unended("task own", "the trial did not end in 40 s", busy)
    assert (found.id, found.severity) == ("not-tried", "warning")
    assert found.evidence == "the trial did not end in 40 s; load 3.1 on 2 cores"


def test_a_redis_is_judged_by_what_it_says_of_itself_and_not_by_what_it_hides() -> None:
    well = StoreFacts("redis://r", (9, 1), "noeviction", 0, True, False)
    assert list(of_store(well)) == list(of_store(StoreFacts("redis://r"))) == []
    faults = {
        "redis-evicts": replace(well, eviction="allkeys-lru"),
        "redis-too-old": replace(well, version=(5, 0)),
        "redis-persistence": replace(well, appendonly=False),
        "redis-memory": replace(well, maxmemory=8 * MIB),
    }
    assert {name: only(list(of_store(facts))).id for name, facts in faults.items()} == {name: name for name in faults}


def test_a_clock_that_is_off_is_named_and_a_second_is_not() -> None:
    found = only(list(of_clocks({"s0": -40.0, "s1": 1.0}, "this host")))
    assert "s0" in found.cause
    assert "40 s behind" in found.evidence


def test_a_model_folder_is_judged_by_its_files() -> None:
    well = ModelFiles("m")
    assert list(of_model(well, chats=True)) == []
    assert ids(list(of_model(replace(well, config="it is not there", weights=0)))) == ["model-folder"]
    assert ids(list(of_model(replace(well, weights=0)))) == ["model-folder"]
    assert ids(list(of_model(replace(well, tokenizer="it is not there")))) == ["tokenizer"]
    assert ids(list(of_model(replace(well, chat_template=False), chats=True))) == ["chat-template"]
    assert list(of_model(replace(well, chat_template=False))) == []


def test_characters_that_a_tokenizer_of_characters_lacks_are_named() -> None:
    model = ModelFiles("m", characters=frozenset("abc "))
    found = only(list(of_characters(model, "own", " Aab\n")))
    assert (found.id, found.severity) == ("unknown-characters", "warning")
    assert "no token for A '\\n': each" in found.evidence
    assert "task own" in found.cause
    assert list(of_characters(model, "own", "abc ")) == []
    assert list(of_characters(ModelFiles("m"), "own", "A")) == [], "pieces of words are put together of bytes"
    many = only(list(of_characters(model, "own", "ABCDEFGHIJKLM")))
    assert "J …: each" in many.evidence


@pytest.mark.parametrize(
    ("model", "known"),
    [
        ('{"type": "WordLevel", "vocab": {"$": 0, "a": 1, " ": 2}}', frozenset("a ")),
        ('{"type": "WordLevel", "vocab": {"word": 0, "a": 1}}', None),
        ('{"type": "WordLevel"}', None),
        ('{"type": "BPE", "vocab": {"a": 0}, "merges": []}', None),
    ],
    ids=["characters", "words", "without a vocabulary", "pieces"],
)
def test_a_folder_tells_its_characters_where_each_is_a_token(
    model: str, known: frozenset[str] | None, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(f'{{"added_tokens": [{{"id": 0, "content": "$"}}], "model": {model}}}')
    found = read_model_files(tmp_path)
    assert (found.tokenizer, found.characters) == (None, known)


def test_plain_text_that_nobody_chose_is_told_of_where_the_model_has_a_template() -> None:
    tried = [TaskTrial(task="own", speaks="text", assumed=True), TaskTrial(task="meant", speaks="text")]
    found = only(list(of_dialects(tried, chat_template=True)))
    assert (found.id, found.severity) == ("dialect", "warning")
    assert "task own speaks plain text" in found.cause and "?dialect=chat, or ?dialect=text" in found.remedy
    assert list(of_dialects(tried, chat_template=False)) == []


def test_a_run_that_no_memory_holds_is_refused_with_the_sum_and_adapters_take_less() -> None:
    seven_billion = ModelShape(4096, 32, 32, 8, 128, 12288, 151936)
    parts = least_host_bytes(seven_billion, MemoryOptions(tokens=4096), engines=2, item_bytes=4.0)
    assert parts["trainer"] > 16 * seven_billion.parameters, "weights, gradients, two moments in float32"
    assert parts["2 engines"] == 2 * 2 * 4 * seven_billion.parameters
    found = only(list(of_memory(parts, 24 << 30)))
    assert (found.id, "2 engines" in found.evidence) == ("memory", True)
    adapters = least_host_bytes(seven_billion, MemoryOptions(tokens=1, lora_rank=16), engines=2, item_bytes=2.0)
    assert sum(adapters.values()) < sum(parts.values()) / 2
    assert list(of_memory(adapters, 1 << 40)) == []


WELL_TRIED = TaskTrial(
    task="t", speaks="text", problems=64, held_out=64, different=64, rewards=[0.0, 1.0] * 8, right_answers=8
)


@pytest.mark.parametrize(
    ("which", "changes"),
    [
        ("environment-fails", {"failed": "ValueError: no (t.py:3)"}),
        ("environment-nondeterministic", {"changed": "problem 0 was asked for twice"}),
        ("environment-equal-rewards", {"rewards": [0.5] * 16, "right_answers": 0}),
        ("environment-equal-rewards", {"rewards": [0.0] * 16}),
        ("environment-slow", {"problem_s": 0.4}),
        ("environment-slow", {"respond_s": 0.4}),
        ("environment-splits-overlap", {"shared": 30}),
        ("environment-repeats-problems", {"different": 13}),
        ("environment-repeats-problems", {"different": 1}),
    ],
)
def test_each_fault_of_an_environment_is_named(which: str, changes: dict[str, object]) -> None:
    from msgspec.structs import replace as changed

    assert only(list(of_trial(changed(WELL_TRIED, **changes)))).id == which
    assert list(of_trial(WELL_TRIED)) == []
    # Nonsense alone is worth nothing, and no judge of ours was asked: neither says anything.
    for unknown in ({"rewards": [0.0] * 16, "right_answers": 0}, {"rewards": []}, {"different": 0}):
        assert list(of_trial(changed(WELL_TRIED, **unknown))) == []


def steps(count: int, **changes: object) -> list[StepMetrics]:
    values: dict[str, object] = {"success": 0.5, "tokens_per_s": 1000.0, "reward": 0.5, "reward_spread": 0.4}
    return [step_metrics(step, **(values | changes)) for step in range(1, count + 1)]


def test_steps_that_became_slow_are_named_with_their_stage() -> None:
    slow = {"step_ms": 6000.0, "wait_ms": 5200.0, "tokens_per_s": 150.0}
    found = only(list(of_steps([*steps(20), *steps(5, **slow)])))
    assert found.id == "throughput-drop"
    assert "waiting for a batch" in found.cause
    assert "wait_ms 250 → 5200" in found.evidence
    slow = {"step_ms": 6000.0, "train_ms": 5200.0, "tokens_per_s": 150.0}
    assert "the optimizer step" in only(list(of_steps([*steps(20), *steps(5, **slow)]))).cause
    longer = {"step_ms": 6000.0, "train_ms": 5200.0, "tokens_per_s": 900.0}
    assert list(of_steps([*steps(20), *steps(5, **longer)])) == [], "longer answers take longer"


def test_success_and_reward_that_are_lost_again_are_named() -> None:
    fallen = only(list(of_steps([*steps(10, success=0.8), *steps(5, success=0.2)])))
    assert fallen.id == "reward-collapse"
    assert "0.80 to 0.20" in fallen.cause
    without = [*steps(10, success=0.0, reward=2.0), *steps(5, success=0.0, reward=-1.0)]
    assert only(list(of_steps(without))).id == "reward-collapse"
    assert list(of_steps([*steps(10, success=0.2), *steps(5, success=0.8)])) == []


@pytest.mark.parametrize(
    ("which", "changes"),
    [
        ("logprob-gap", {"logprob_gap_mean": 0.3}),
        ("equal-rewards", {"equal_groups": 1.0}),
        ("cannot-learn", {"truncated": 0.5}),
    ],
)
def test_signs_that_the_trainer_saw_are_findings_of_the_last_steps(which: str, changes: dict[str, object]) -> None:
    (plain,) = steps(1, logprob_gap_mean=None, entropy=None, grad_norm=None, ratio_mean=None)
    ill = replace(plain, **changes)  # type: ignore[arg-type]
    ill = replace(ill, warnings=signs(ill, ill, 1.0))
    found = only(list(of_steps([ill] * 3)))
    assert found.id == which
    assert found.remedy in next(iter(ill.warnings.values()))
    assert list(of_steps([*[ill] * 3, plain])) == [], "it is over"


def test_a_log_that_speaks_of_memory_is_quoted_and_an_interrupted_run_by_its_errors() -> None:
    logs = {
        "trainer": "2026 [info ] step\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n",
        "s0": "2026 [error ] failed why=it\n",
    }
    found = only(list(of_logs(logs)))
    assert (found.id, "trainer" in found.cause, "Tried to allocate" in found.evidence) == ("out-of-memory", True, True)
    ended = only(list(of_interrupted("runs/a", 3, 60, logs)))
    assert "step 3 of 60" in ended.cause
    assert "s0: 2026 [error ] failed" in ended.evidence
    assert "rollmesh up --resume runs/a" in ended.remedy


@pytest.mark.parametrize(
    "line",
    [
        "2026 [warning ] group lost   again=True cause={} task=t why='ModelBehaviorError: no tool (a.py:3)'",
        '{{"cause": "{}", "why": "ModelBehaviorError: no tool (a.py:3)", "event": "group lost", "level": "warning"}}',
    ],
)
def test_an_environment_that_loses_groups_by_its_own_code_is_named(line: str) -> None:
    logs = {"environment": "\n".join([line.format("environment")] * 3)}
    found = only(list(of_logs(logs)))
    assert found.id == "groups-lost" and "ModelBehaviorError: no tool (a.py:3)" in found.evidence
    assert list(of_logs({"environment": "\n".join([line.format("environment")] * 2)})) == []
    assert list(of_logs({"environment": "\n".join([line.format("server")] * 9)})) == []


def test_sure_causes_of_the_status_are_findings_and_likely_ones_are_not() -> None:
    gone = Cause("gone", "s0", NOW - 5, "s0 is gone", True)
    likely = Cause("open_group", "s0", NOW, "group 1", False)
    assert only(list(of_causes([gone, likely], NOW))).evidence == "gone for 5 s"
    assert only(list(of_unread(["waits: no", "trainer: no"]))).evidence == "waits: no; trainer: no"
    assert list(of_unread([])) == []


def verified(*engines: tuple[str, int, str], version: int = 7, digest: str = "aa") -> VerifyView:
    served = [EngineDigest(engine_id=name, version=at, root_digest=its) for name, at, its in engines]
    return VerifyView(version=version, root_digest=digest, engines=served, match=False)


def test_weights_that_differ_within_a_version_are_named_and_an_update_under_way_is_not() -> None:
    wrong = only(list(of_weights(verified(("s0", 7, "aa"), ("s1", 7, "bb")))))
    assert (wrong.id, wrong.cause) == ("weights-diverged", "s1 serves other weights than version 7")
    both = list(of_weights(verified(("s0", 7, "bb"), ("s1", 7, "bb"))))
    assert len(both) == 2, "agreeing with each other they are as wrong"
    older = list(of_weights(verified(("s0", 6, "cc"), ("s1", 6, "cc"), ("s2", 6, "dd"))))
    assert only(older).cause.startswith("s2")
    assert list(of_weights(verified(("s0", 7, "aa"), ("s1", 6, "cc"), ("s2", -1, "")))) == []


def test_a_server_far_behind_its_siblings_is_a_straggler_in_two_looks() -> None:
    slow = [Sampling("s0", 900, 10), Sampling("s1", 1000, 10), Sampling("s2", 100, 10)]
    seen = stragglers(slow)
    assert list(seen) == ["s2"]
    assert only(list(of_stragglers(seen, seen))).id == "straggler"
    assert list(of_stragglers(seen, {})) == []
    idle = [Sampling("s0", 900, 10), Sampling("s1", 0, 0)]
    few = [Sampling("s0", 40, 1), Sampling("s1", 0, 1)]
    fewer = [Sampling("s0", 900, 90), Sampling("s1", 10, 1)]
    assert stragglers(idle) == stragglers(few) == stragglers(fewer) == {}


def test_leases_that_come_and_go_are_named() -> None:
    def left(engine: str, ago: float) -> WeightEvent:
        return WeightEvent(id="1", at=NOW - ago, kind="left", engine_id=engine)

    found = only(list(of_events([left("s0", 10), left("s1", 20), left("s0", 60)], NOW)))
    assert (found.id, "s0" in found.cause, "2 times" in found.evidence) == ("lease-flapping", True, True)
    assert list(of_events([left("s0", 10), left("s0", 5000)], NOW)) == []


def counted(**changes: int) -> Counted:
    figures = {
        "published": 10,
        "trained": 6,
        "dropped": 1,
        "unsettled": 3,
        "opened_groups": 5,
        "closed_groups": 3,
        "dropped_groups": 1,
        "open_groups": 2,
    }
    return Counted(**(figures | changes), standing=frozenset({"g1"}))


def test_both_balances_of_the_account_are_held() -> None:
    def found(seen: Counted, *, unaccounted: int = 0, corrected: int = 0, read: bool = True) -> list[Finding]:
        return list(of_account(seen, unaccounted=unaccounted, corrected=corrected, read=read))

    assert found(counted()) == []
    assert "published 9 ≠ trained 6 + dropped 1 + unsettled 3" in only(found(counted(published=9))).evidence
    assert found(counted(published=12), read=False) == [], "some of the stream is not read yet"
    assert only(found(counted(published=5), read=False)).id == "account-wrong"
    assert "opened 6 ≠ closed 3 + open 2" in only(found(counted(opened_groups=6))).evidence
    assert only(found(counted(), unaccounted=2)).severity == "error"
    assert only(found(counted(), corrected=2)).severity == "warning"
