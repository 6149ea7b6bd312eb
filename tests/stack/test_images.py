"""The images: small, without root, without torch where none is needed, pinned, and without a secret in any layer."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.compose_stack import ROOT, build_environ

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("images")]

IMAGES = ("service", "trainer", "rollout-cpu", "prometheus")
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=\s]{200,}")
LARGEST_TEXT = 1 << 18


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"docker {' '.join(words)}\n{done.stderr}"
    return done.stdout


def in_image(image: str, *words: str) -> str:
    return docker(
        "run",
        "--rm",
        "--network",
        "none",
        "--read-only",
        "--tmpfs",
        "/tmp",
        "--entrypoint",
        words[0],
        f"rollmesh-{image}",
        *words[1:],
    )


def files_of(image: str) -> Iterator[tuple[str, bytes]]:
    """Every file of every layer and the contents of the small ones, those too that a later layer hides."""
    saving = subprocess.Popen(["docker", "save", f"rollmesh-{image}"], stdout=subprocess.PIPE)
    assert saving.stdout is not None
    with saving, tarfile.open(fileobj=saving.stdout, mode="r|") as saved:
        for entry in saved:
            stream = saved.extractfile(entry) if entry.isfile() and entry.size > 1024 else None
            if stream is None or entry.name.endswith(".json"):
                continue
            # What is no tar is a manifest; `docker history` tells what is in it.
            with suppress(tarfile.ReadError), tarfile.open(fileobj=stream, mode="r|") as layer:
                for file in layer:
                    found = layer.extractfile(file) if file.isfile() and file.size <= LARGEST_TEXT else None
                    yield file.name, b"" if found is None else found.read()


def test_the_small_image_is_small_and_holds_no_torch() -> None:
    assert int(docker("image", "inspect", "--format", "{{.Size}}", "rollmesh-service")) <= 250_000_000
    listed = in_image("service", "python3", "-c", "import importlib.util as u; print(u.find_spec('torch'))")
    assert listed.strip() == "None"


@pytest.mark.parametrize("image", IMAGES)
def test_it_runs_as_nobody_special(image: str) -> None:
    assert docker("image", "inspect", "--format", "{{.Config.User}}", f"rollmesh-{image}").strip() == "1000:1000"


@pytest.mark.parametrize(
    ("image", "commands"),
    [
        (
            "service",
            (
                *("redis", "gateway", "weight-bus", "rewards", "dashboard"),
                *("play", "run-environment", "prepare", "keys", "status"),
            ),
        ),
        ("trainer", ("train", "sft")),
        ("rollout-cpu", ("rollout-server", "train")),
    ],
)
def test_its_commands_are_there(image: str, commands: tuple[str, ...]) -> None:
    asked = " && ".join(f"rollmesh {command} --help >/dev/null" for command in commands)
    in_image(image, "sh", "-euc", asked)


@pytest.mark.parametrize(
    ("image", "modules"),
    [
        (
            "service",
            "weight_bus.coordinator.app, weight_bus.manifest.snapshot, services.gateway.app, services.rewards.app, "
            "services.dashboard.app, opentelemetry.sdk",
        ),
        ("trainer", "torch, transformers, trainer.run, nixl_cu12._api"),
        ("rollout-cpu", "torch, vllm, rollout_server.engines.torch.engine, nixl_cu12._api"),
    ],
)
def test_its_packages_can_be_imported(image: str, modules: str) -> None:
    in_image(image, "python3", "-c", f"import {modules}")


@pytest.mark.parametrize("image", ["service", "trainer", "rollout-cpu"])
def test_every_package_is_pinned(image: str) -> None:
    lines = (ROOT / "deploy" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)
    told = in_image(
        image,
        "python3",
        "-c",
        "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions()]))",
    )
    held = {re.sub(r"[-_.]+", "-", name).lower(): version.partition("+")[0] for name, version in json.loads(told)}
    del held["rollmesh"]
    assert len(held) > 30
    assert {name: version for name, version in held.items() if pins.get(name) != version} == {}


def test_no_layer_holds_a_secret(tmp_path: Path) -> None:
    bundle = build_environ().get("ROLLMESH_CA_BUNDLE")
    certificates = b"" if bundle is None else Path(bundle).read_bytes()
    for image in IMAGES:
        told = docker("history", "--no-trunc", f"rollmesh-{image}") + docker("inspect", f"rollmesh-{image}")
        assert "BEGIN" not in told and "wheels" not in json.loads(docker("inspect", f"rollmesh-{image}"))[0]["Config"]
        seen = 0
        for name, content in files_of(image):
            seen += 1
            assert not name.endswith(".key"), f"{image}: {name}"
            assert not name.startswith(("run/secrets/", "wheels/")), f"{image}: {name}"
            held = b"PRIVATE KEY" in content and PRIVATE_KEY.search(content)
            assert not held, f"{image}: {name} holds a private key"
            assert not certificates or content != certificates or name.startswith("etc/ssl/"), f"{image}: {name}"
        assert seen > 500


def test_keys_never_reach_a_build(tmp_path: Path) -> None:
    """.dockerignore is asked, by a build that copies all that it may."""
    for folder, name in (("deploy/keys", "agent.key"), ("deploy", "stray.key"), ("services", "stray.pem")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text("secret")
    (tmp_path / "services" / "app.py").write_text("")
    (tmp_path / ".dockerignore").write_text((ROOT / ".dockerignore").read_text(encoding="utf-8"))
    (tmp_path / "Copy").write_text("FROM scratch\nCOPY . /\n")
    docker("build", "-f", str(tmp_path / "Copy"), "--output", f"type=local,dest={tmp_path / 'out'}", str(tmp_path))
    copied = [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert copied == ["services/app.py"]
