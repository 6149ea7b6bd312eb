"""deploy/kubernetes as Kubernetes would get it: rendered by the real kustomize, read object by object."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from services.security.keys import make_keys
from tests.support.fetch_tools import find_tool

ROOT = Path(__file__).parents[2]
COMPONENT = "app.kubernetes.io/component"
Object = Mapping[str, Any]


def kustomize_command() -> tuple[str, ...] | None:
    """`kustomize build`, of its own or of kubectl's; None where there is neither."""
    own, kubectl = find_tool("kustomize"), find_tool("kubectl")
    if own is not None:
        return (own, "build")
    return None if kubectl is None else (kubectl, "kustomize")


def render(folder: Path, overlay: str, *components: str) -> list[Object]:
    """An overlay of a copy of deploy/ in `folder`, with keys of its own; `components` are added to it."""
    tool = kustomize_command()
    assert tool is not None
    # As in a clone: what git does not know is no part of it.
    shutil.copytree(ROOT / "deploy", folder, ignore=shutil.ignore_patterns("*.key", "__pycache__"))
    make_keys(folder / "kubernetes/keys")
    target = folder / "kubernetes/overlays" / overlay
    if components:
        file = target / "kustomization.yaml"
        chosen = yaml.safe_load(file.read_text())
        named = [f"../../components/{name}" for name in components]
        chosen["components"] = list(dict.fromkeys([*chosen.get("components", []), *named]))
        file.write_text(yaml.safe_dump(chosen))
    done = subprocess.run([*tool, str(target)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


@dataclass(frozen=True)
class Workload:
    """What makes pods of one kind. `spec`: the pod's."""

    kind: str
    name: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    owner: Object = field(repr=False)

    @property
    def component(self) -> str:
        return self.labels[COMPONENT]

    @property
    def container(self) -> Mapping[str, Any]:
        """The one that serves."""
        return self.spec["containers"][0]

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


class Manifests:
    """All objects of one rendered overlay."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects

    def of(self, kind: str) -> dict[str, Object]:
        """By name."""
        return {each["metadata"]["name"]: each for each in self.objects if each["kind"] == kind}

    def workloads(self) -> list[Workload]:
        made = [each for each in self.objects if each["kind"] in ("Deployment", "StatefulSet", "Job")]
        return [
            Workload(
                each["kind"],
                each["metadata"]["name"],
                each["spec"]["template"]["metadata"]["labels"],
                each["spec"]["template"]["spec"],
                each,
            )
            for each in made
        ]

    def workload(self, component: str) -> Workload:
        (found,) = [each for each in self.workloads() if each.component == component]
        return found

    def environ(self, workload: Workload, container: Mapping[str, Any]) -> dict[str, str]:
        """A container's variables, with what only a node knows written as in the pod with index 0."""
        known = {
            "metadata.name": f"{workload.name}-0",
            "status.podIP": "10.0.0.1",
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": "0",
        }
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= self.of("ConfigMap")[source["configMapRef"]["name"]]["data"]
        for each in container.get("env", []):
            value = each.get("value")
            found[each["name"]] = known[each["valueFrom"]["fieldRef"]["fieldPath"]] if value is None else value
        return found

    def command_line(self, workload: Workload, container: Mapping[str, Any]) -> list[str]:
        """As it is run, `$(NAME)` replaced as Kubernetes does; without `command` the image's own is `rollmesh`."""
        variables = self.environ(workload, container)
        words = [*container.get("command", ["rollmesh"]), *container.get("args", [])]
        return [re.sub(r"\$\(([A-Z_]+)\)", lambda found: variables[found[1]], word) for word in words]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector, or a Service's plain one, takes these labels."""
    plain = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    if any(labels.get(name) != value for name, value in plain.items()):
        return False
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In", "another operator is not understood here"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True


def strings(value: Any) -> Iterator[str]:
    """Every text in a tree."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)
