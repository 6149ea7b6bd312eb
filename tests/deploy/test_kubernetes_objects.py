"""What Kubernetes is given is well formed, holds together, and lets nobody in who has no business there."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.config.settings import RunSettings
from services.observability import catalog
from tests.support.command_lines import torchrun_asks
from tests.support.fetch_tools import find_tool
from tests.support.manifests import COMPONENT, ROOT, Manifests, Object, Workload, selects

FOREIGN = ("ServiceMonitor", "PrometheusRule")
"""Of Prometheus's operator: Kubernetes itself has no schema for them."""
VERSIONS = ("1.30", "1.37")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_as_the_schema_of_kubernetes_says(manifests: Manifests, version: str) -> None:
    for each in manifests.objects:
        if each["kind"] not in FOREIGN:
            kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_finds_what_is_wrong(manifests: Manifests) -> None:
    broken = json.loads(json.dumps(manifests.workload("gateway").owner))
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_everything_is_in_the_namespace_and_bears_the_name(manifests: Manifests) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests.objects]
    assert len(set(names)) == len(names)
    for each in manifests.objects:
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "rollmesh"
        assert each["metadata"]["name"].startswith("rollmesh")


def test_a_workload_selects_its_own_pods_and_no_others(manifests: Manifests) -> None:
    for each in manifests.workloads():
        selector = each.owner["spec"].get("selector")
        if selector is not None:
            assert [other.name for other in manifests.workloads() if selects(selector, other.labels)] == [each.name]


def ports_of(workload: Workload) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for each in workload.containers for port in each.get("ports", [])}


def test_a_service_leads_to_one_workload_on_a_port_that_it_has(manifests: Manifests) -> None:
    for name, service in manifests.of("Service").items():
        (behind,) = [each for each in manifests.workloads() if selects(service["spec"]["selector"], each.labels)]
        assert behind.name == name
        for port in service["spec"]["ports"]:
            assert ports_of(behind)[port["targetPort"]] == port["port"]
    stateful = [each for each in manifests.workloads() if each.kind == "StatefulSet"]
    assert {each.owner["spec"]["serviceName"] for each in stateful} <= set(manifests.of("Service"))


def test_probes_ask_ports_that_there_are(manifests: Manifests) -> None:
    for workload in manifests.workloads():
        serving = workload.component != "environment"
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = workload.container.get(name)
            assert (probe is not None) == serving, f"{workload.name} {name}"
            asked = (probe or {}).get("httpGet") or (probe or {}).get("tcpSocket")
            if asked is not None:
                assert asked["port"] in ports_of(workload)
                path = asked.get("path")
                assert path is None or path == ("/readyz" if name == "readinessProbe" else "/livez")
            elif probe is not None:
                script = next(word for word in probe["exec"]["command"] if word.endswith(".py"))
                assert (ROOT / script.removeprefix("/app/")).exists()


def test_what_is_mounted_is_there(manifests: Manifests) -> None:
    for workload in manifests.workloads():
        claimed = [each["metadata"]["name"] for each in workload.owner["spec"].get("volumeClaimTemplates", [])]
        volumes = {each["name"]: each for each in workload.spec["volumes"]}
        mounted = {mount["name"] for each in workload.containers for mount in each["volumeMounts"]}
        assert mounted == set(volumes) | set(claimed)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in manifests.of("PersistentVolumeClaim")
            elif "configMap" in volume:
                assert volume["configMap"]["name"] in manifests.of("ConfigMap")
            elif "secret" in volume:
                data = manifests.of("Secret")[volume["secret"]["secretName"]]["data"]
                assert {item["key"] for item in volume["secret"]["items"]} <= set(data)
            else:
                assert "sizeLimit" in volume["emptyDir"]


def test_no_pod_may_more_than_it_must(manifests: Manifests) -> None:
    for workload in manifests.workloads():
        held = workload.spec["securityContext"]
        assert held["runAsNonRoot"] and held["runAsUser"] and held["seccompProfile"]["type"] == "RuntimeDefault"
        assert workload.spec["automountServiceAccountToken"] is False
        for each in workload.containers:
            context = each["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            added = context["capabilities"].get("add", [])
            assert added in ([], ["IPC_LOCK"])
            level = manifests.of("Namespace")["rollmesh"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
            assert level == ("privileged" if added else level), "the namespace would refuse the pod"
            assert each["resources"]["requests"] and "memory" in each["resources"]["limits"]


def test_images_are_the_targets_of_the_dockerfile(manifests: Manifests) -> None:
    targets = re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "deploy/Dockerfile").read_text(), flags=re.MULTILINE)
    for workload in manifests.workloads():
        for each in workload.containers:
            name, _, tag = each["image"].rpartition(":")
            assert name.removeprefix("rollmesh-") in targets
            assert tag and tag != "latest"


def test_a_trainers_pods_are_the_nodes_of_its_ranks(manifests: Manifests) -> None:
    """Others would wait for each other, or train the same run twice."""
    pytest.importorskip("torch")
    trainer = manifests.workload("trainer")
    job, asked = trainer.owner["spec"], torchrun_asks(manifests.command_line(trainer, trainer.container))
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", asked.nodes, asked.nodes)
    limits = trainer.container["resources"]["limits"]
    assert int(limits.get("nvidia.com/gpu", 1)) == asked.ranks_a_node
    if asked.nodes == 1:
        return
    assert asked.node == 0 and asked.master == f"{trainer.name}-0.{trainer.spec['subdomain']}"
    assert ("trainer", "any") in allowed(manifests)["trainer"]
    # The others have no port: nobody may ask them.
    (port,) = ports_of(trainer).values()
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        words = trainer.container[name]["exec"]["command"]
        assert words[2].startswith('[ "$NODE_RANK" != 0 ] || exec')
        assert words[-1] == f"http://{asked.master}:{port}"
        assert ("--live" in words) == (name != "readinessProbe")


def test_budgets_and_autoscaler_are_for_what_there_is(manifests: Manifests) -> None:
    for budget in manifests.of("PodDisruptionBudget").values():
        (held,) = [each for each in manifests.workloads() if selects(budget["spec"]["selector"], each.labels)]
        assert held.owner["spec"].get("replicas", 2) >= 2, "a budget for one pod blocks every drain"
    for scaler in manifests.of("HorizontalPodAutoscaler").values():
        target = scaler["spec"]["scaleTargetRef"]
        scaled = manifests.of(target["kind"])[target["name"]]
        assert "replicas" not in scaled["spec"], "kubectl apply would set back what the autoscaler chose"
        (metric,) = [each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]]
        assert metric == catalog.ROLLOUT_WAITING.name
        rules = yaml.safe_load((ROOT / "deploy/kubernetes/components/autoscaling/prometheus-adapter.yaml").read_text())
        (rule,) = rules["rules"]["custom"]
        assert rule["name"]["as"] == metric and rule["seriesQuery"].startswith(metric + "{")


def reaching(manifests: Manifests, policy: Object, target: Workload) -> set[tuple[str, str]]:
    """Who gets in by a policy, and on which port: (component or `anybody`, or a namespace; port's name or `any`)."""
    found: set[tuple[str, str]] = set()
    for rule in policy["spec"].get("ingress", []):
        ports = [str(port["port"]) for port in rule.get("ports", [{"port": "any"}])]
        assert all(port == "any" or port in ports_of(target) for port in ports)
        for peer in rule.get("from", [{}]):
            if "podSelector" in peer:
                who = [each.component for each in manifests.workloads() if selects(peer["podSelector"], each.labels)]
                assert who
            else:
                who = [json.dumps(peer["namespaceSelector"]) if "namespaceSelector" in peer else "anybody"]
            found |= {(each, port) for each in who for port in ports}
    return found


def allowed(manifests: Manifests) -> dict[str, set[tuple[str, str]]]:
    """Component → who gets in."""
    policies = manifests.of("NetworkPolicy").values()
    found: dict[str, set[tuple[str, str]]] = {}
    for workload in manifests.workloads():
        mine = [each for each in policies if selects(each["spec"]["podSelector"], workload.labels)]
        assert mine, f"{workload.name} is open"
        found[workload.component] = set().union(*(reaching(manifests, each, workload) for each in mine))
    return found


def needed(manifests: Manifests) -> dict[str, set[str]]:
    """Component → whom it calls, as its own command line and variables say."""
    found: dict[str, set[str]] = {}
    for workload in manifests.workloads():
        said = " ".join(manifests.command_line(workload, workload.container))
        said += " ".join(manifests.environ(workload, workload.container).values())
        called = {name.removeprefix("rollmesh-") for name in re.findall(r"//(rollmesh-[a-z-]+)[:/]", said)}
        # Every pod knows where Redis is; whoever has no password has no business there.
        keys = {
            item["key"] for each in workload.spec["volumes"] if "secret" in each for item in each["secret"]["items"]
        }
        found[workload.component] = called - {workload.component} - (set() if "redis.key" in keys else {"redis"})
    # Whom they are told of at run time.
    found["gateway"] |= {"rollout"}
    found["weight-bus"] |= {"rollout"}
    found["dashboard"] |= {"rollout", "weight-bus", "gateway", "trainer"}
    return found


def test_from_outside_only_the_gateway_is_reached(manifests: Manifests) -> None:
    authorizer = allowed(manifests)
    assert [name for name, who in authorizer.items() if any(each == "anybody" for each, _ in who)] == ["gateway"]
    assert authorizer["dashboard"] == set()
    assert not any(("anybody", "any") in who for who in authorizer.values())


def test_whoever_calls_another_gets_in(manifests: Manifests) -> None:
    authorizer, calls = allowed(manifests), needed(manifests)
    assert calls["environment"] == {"gateway", "rewards"} and calls["trainer"] == {"redis", "weight-bus"}
    for caller, called in calls.items():
        for target in called:
            (port,) = ports_of(manifests.workload(target))
            assert {(caller, port), (caller, "any"), ("anybody", port)} & authorizer[target], f"{caller} → {target}"
    # Weights take ports of their own.
    assert ("rollout", "any") in authorizer["trainer"] and ("trainer", "any") in authorizer["rollout"]


def test_prometheus_finds_every_service_and_gets_in(manifests: Manifests) -> None:
    authorizer = allowed(manifests)
    for monitor in manifests.of("ServiceMonitor").values():
        (endpoint,) = monitor["spec"]["endpoints"]
        scraped = [
            name
            for name, each in manifests.of("Service").items()
            if selects(monitor["spec"]["selector"], each["metadata"]["labels"])
            and endpoint["port"] in [port["name"] for port in each["spec"]["ports"]]
        ]
        exporting = {"weight-bus", "rollout", "gateway", "rewards", "trainer"}
        assert {name.removeprefix("rollmesh-") for name in scraped} == exporting
        for component in exporting:
            assert any("monitoring" in who or who == "anybody" for who, _ in authorizer[component])


def test_the_operators_rules_are_rules(manifests: Manifests, tmp_path: Path) -> None:
    promtool = find_tool("promtool")
    rules = manifests.of("PrometheusRule")
    if not rules or promtool is None:
        pytest.skip("no PrometheusRule here, or no promtool")
    plain = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    assert rules["rollmesh"]["spec"] == plain
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules["rollmesh"]["spec"]))
    assert subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, check=False).returncode == 0


def test_labels_are_those_that_selectors_ask_for(manifests: Manifests) -> None:
    labels: list[Any] = [each.labels for each in manifests.workloads()]
    assert all({COMPONENT, "app.kubernetes.io/name"} <= set(each) for each in labels)


def test_pods_ask_for_the_gpus_that_the_settings_of_their_overlay_want(manifests: Manifests) -> None:
    text = manifests.of("ConfigMap")
    (mesh,) = [each["data"]["mesh.toml"] for name, each in text.items() if name.startswith("rollmesh-mesh")]
    settings = RunSettings.model_validate(tomllib.loads(mesh))
    wanted = {"rollout": settings.rollout.tensor_parallel, "trainer": settings.trainer.parallel.least_ranks}
    for name, gpus in wanted.items():
        limits = manifests.workload(name).containers[0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu") in (None, str(gpus)), name
