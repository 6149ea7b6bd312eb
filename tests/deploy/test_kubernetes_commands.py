"""Command lines, keys and settings in deploy/kubernetes, as the programs themselves read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.config.load import load_settings
from services.config.settings import RunSettings
from services.host.run_folder import RunFolder
from services.security.permissions import GIVEN, HolderName
from tests.support.command_lines import after_shell, parse, torchrun_asks
from tests.support.manifests import Manifests, Workload

COMMANDS: Mapping[str, tuple[str, HolderName]] = {
    "redis": ("redis", "reader"),
    "weight-bus": ("weight-bus", "weight-bus"),
    "rollout": ("rollout-server", "rollout-server"),
    "gateway": ("gateway", "gateway"),
    "rewards": ("rewards", "rewards"),
    "trainer": ("train", "trainer"),
    "environment": ("play", "environment"),
    "dashboard": ("dashboard", "dashboard"),
}
"""Component → the command that it runs, and whose keys it is given."""


def command_of(manifests: Manifests, workload: Workload) -> tuple[str, dict[str, Any]]:
    words = manifests.command_line(workload, workload.container)
    if words[0] == "torchrun":
        pytest.importorskip("torch")
        words = ["rollmesh", *torchrun_asks(words).command]
    return parse(words)


def settings_of(manifests: Manifests, tmp_path: Path) -> RunSettings:
    (mesh,) = [each for name, each in manifests.of("ConfigMap").items() if name.startswith("rollmesh-mesh")]
    file = tmp_path / "mesh.toml"
    file.write_text(mesh["data"]["mesh.toml"])
    return load_settings(file, [])


def test_every_command_is_understood(manifests: Manifests) -> None:
    assert {each.component for each in manifests.workloads()} == set(COMMANDS)
    for workload in manifests.workloads():
        name, chosen = command_of(manifests, workload)
        assert name == COMMANDS[workload.component][0]
        if "host" in chosen:
            assert chosen["host"] == "0.0.0.0", "nobody else would reach it"
            (port,) = workload.container["ports"]
            assert chosen["port"] == port["containerPort"]
        if "config" in chosen:
            assert str(chosen["config"]) == "/etc/rollmesh/mesh.toml"


def test_a_flag_that_is_none_is_found(manifests: Manifests) -> None:
    workload = manifests.workload("gateway")
    words = manifests.command_line(workload, workload.container)
    with pytest.raises(Exception, match="no-such-flag"):
        parse([*words, "--no-such-flag=1"])


def test_before_the_trainer_the_run_is_prepared(manifests: Manifests) -> None:
    trainer = manifests.workload("trainer")
    (first,) = trainer.spec["initContainers"]
    name, prepared = parse(after_shell(manifests.command_line(trainer, first)))
    _, trained = command_of(manifests, trainer)
    assert name == "prepare"
    assert prepared["run_dir"] == trained["run_dir"]
    _, played = command_of(manifests, manifests.workload("environment"))
    assert played["run_dir"] == trained["run_dir"]


def test_each_pod_mounts_the_keys_that_it_reads_and_no_other(manifests: Manifests) -> None:
    for workload in manifests.workloads():
        (keys,) = [each["secret"] for each in workload.spec["volumes"] if "secret" in each]
        mounted = {item["path"] for item in keys["items"]}
        assert mounted == {f"{name}.key" for name in GIVEN[COMMANDS[workload.component][1]]}, workload.name
        (place,) = [each for each in workload.container["volumeMounts"] if each["name"] == "keys"]
        variables = manifests.environ(workload, workload.container)
        assert variables["ROLLMESH_KEYS_DIR"] == place["mountPath"]


def test_addresses_lead_to_services(manifests: Manifests) -> None:
    services = manifests.of("Service")
    for workload in manifests.workloads():
        words = manifests.command_line(workload, workload.container)
        values = [*(word.partition("=")[2] for word in words)]
        values += manifests.environ(workload, workload.container).values()
        for address in (urlsplit(value) for value in values if "://" in value):
            if address.hostname == "10.0.0.1":  # its own
                continue
            *pod, service = (address.hostname or "").split(".")
            assert address.port in [port["port"] for port in services[service]["spec"]["ports"]]
            # The address of one pod needs a Service that names pods.
            assert not pod or services[service]["spec"]["clusterIP"] == "None"


def test_a_rollout_server_is_called_as_its_pod(manifests: Manifests) -> None:
    _, chosen = command_of(manifests, manifests.workload("rollout"))
    assert chosen["server_id"] == "rollmesh-rollout-0"
    assert chosen["own_url"] == "http://rollmesh-rollout-0.rollmesh-rollout:8100"
    # It registers with the bus before it is ready.
    assert manifests.of("Service")["rollmesh-rollout"]["spec"]["publishNotReadyAddresses"] is True


def test_the_trainers_figures_are_where_its_settings_say(manifests: Manifests, tmp_path: Path) -> None:
    settings, trainer = settings_of(manifests, tmp_path), manifests.workload("trainer")
    (port,) = trainer.container["ports"]
    assert settings.telemetry.trainer_port == port["containerPort"]
    pod = f"{trainer.name}-0.{trainer.spec['subdomain']}.{trainer.owner['metadata']['namespace']}"
    assert settings.telemetry.trainer_host == f"{pod}.svc.cluster.local"
    assert manifests.of("Service")[trainer.spec["subdomain"]]["spec"]["clusterIP"] == "None"


def test_all_start_from_the_model_that_is_prepared(manifests: Manifests, tmp_path: Path) -> None:
    settings = settings_of(manifests, tmp_path)
    _, trained = command_of(manifests, manifests.workload("trainer"))
    _, served = command_of(manifests, manifests.workload("rollout"))
    assert trained["model"] == served["model"] == (settings.model.path or RunFolder(trained["run_dir"]).model)
    for component in ("trainer", "rollout", "environment"):
        workload = manifests.workload(component)
        (runs,) = [each for each in workload.container["volumeMounts"] if each["name"] == "runs"]
        assert runs["mountPath"] == "/runs"
        assert runs.get("readOnly", False) == (component == "rollout")


def test_the_dashboard_shows_the_run_folder_and_changes_nothing_in_it(manifests: Manifests) -> None:
    workload = manifests.workload("dashboard")
    _, shown = command_of(manifests, workload)
    _, trained = command_of(manifests, manifests.workload("trainer"))
    assert (shown["names"], shown["run_id"]) == ([str(trained["run_dir"])], trained["run_id"])
    for each in workload.containers:
        (runs,) = [mount for mount in each["volumeMounts"] if mount["name"] == "runs"]
        assert (runs["mountPath"], runs["readOnly"]) == ("/runs", True)
    assert workload.owner["spec"]["replicas"] == 1, "another one knows nothing of its logins"


def test_reward_functions_are_among_what_is_mounted(manifests: Manifests, tmp_path: Path) -> None:
    rewards = manifests.workload("rewards")
    (functions,) = [each["configMap"]["name"] for each in rewards.spec["volumes"] if each["name"] == "rewards"]
    for component in settings_of(manifests, tmp_path).rewards.components:
        module = (component.function or "").partition(":")[0]
        assert f"{module}.py" in manifests.of("ConfigMap")[functions]["data"]
    (place,) = [each for each in rewards.container["volumeMounts"] if each["name"] == "rewards"]
    assert rewards.container["workingDir"] == place["mountPath"]
