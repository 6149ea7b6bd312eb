"""The compose files hold what docs/stack.md promises; asked of compose itself, no container is started."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from services.security.permissions import GIVEN
from tests.support.command_lines import parse
from tests.support.compose_stack import Stack, no_engine

pytestmark = pytest.mark.stack
OVERRIDES = ("gpu", "dev", "tls")


def resolved(*overrides: str) -> dict[str, Any]:
    if why := no_engine():
        pytest.skip(why)
    files = [word for name in overrides for word in ("-f", f"deploy/compose.{name}.yaml")]
    said = Stack("rollmesh-config").compose(*files, "--profile", "keys", "config", "--format", "json")
    found: dict[str, Any] = json.loads(said.stdout)
    return found


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_fits_the_base(override: str) -> None:
    assert set(resolved(override)["services"]) == set(resolved()["services"])


@pytest.mark.parametrize("overrides", [(), ("gpu",)])
def test_our_own_parser_takes_every_command_line(overrides: tuple[str, ...]) -> None:
    names = {}
    for service, told in resolved(*overrides)["services"].items():
        if "rollmesh" not in told["image"] or service == "prometheus":
            continue
        words = told["command"]
        if told.get("entrypoint"):
            words = shlex.split(words[0].replace("$$", "$").removeprefix("exec rollmesh ").removeprefix("rollmesh "))
            words = words[: words.index("&&")] if "&&" in words else words
        if words[0] != "keys":
            names[service], _ = parse(["rollmesh", *words])
    assert names == {
        "redis": "redis",
        "prepare": "prepare",
        "warm-start": "prepare",
        "weight-bus": "weight-bus",
        "rollout": "rollout-server",
        "gateway": "gateway",
        "rewards": "rewards",
        "dashboard": "dashboard",
        "environment": "play",
        "trainer": "train",
    }


@pytest.mark.parametrize("overrides", [(), ("gpu",)])
def test_every_container_is_held_down(overrides: tuple[str, ...]) -> None:
    services = resolved(*overrides)["services"]
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert name == "keys" or not service["user"].startswith(("0", "root")), name
        if name != "keys":
            limits = service["deploy"]["resources"]["limits"]
            assert limits["memory"] and limits["cpus"] and limits["pids"], name
    published = [(name, port["host_ip"]) for name, service in services.items() for port in service.get("ports", [])]
    assert sorted(published) == [("dashboard", "127.0.0.1"), ("gateway", "127.0.0.1")]


def test_no_service_is_given_a_key_that_it_does_not_read() -> None:
    holders = {
        "redis": ("redis",),
        "weight-bus": GIVEN["weight-bus"],
        "rollout": GIVEN["rollout-server"],
        "gateway": GIVEN["gateway"],
        "rewards": GIVEN["rewards"],
        "dashboard": GIVEN["dashboard"],
        "environment": GIVEN["environment"],
        "trainer": GIVEN["trainer"],
        "prometheus": ("metrics",),
    }
    for name, service in resolved()["services"].items():
        given = {secret["source"].removesuffix(".key") for secret in service.get("secrets", [])}
        assert given == set(holders.get(name, ())), name


def test_gpus_memory_and_rdma_are_reserved() -> None:
    services = resolved("gpu")["services"]
    for name, own in (("rollout", "1"), ("trainer", "0")):
        service = services[name]
        (gpu,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert gpu["driver"] == "nvidia" and gpu["capabilities"] == ["gpu"]
        assert gpu["device_ids"] == [own]
        assert service["image"].startswith("rollmesh-rollout-gpu")
        assert service["ulimits"]["memlock"] == -1
        assert int(service["shm_size"]) >= 1 << 30
        assert [device["target"] for device in service["devices"]] == ["/dev/infiniband"]
