"""deploy/compose.tls.yaml says what deploy/compose.yaml says, over TLS: read as YAML, so that no engine is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVING = ("weight-bus", "rollout", "gateway", "rewards", "trainer", "dashboard")


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return found


def plain(command: Any) -> Any:
    """A command as it was before TLS."""
    if isinstance(command, list):
        return [plain(each) for each in command]
    return command.replace("https://", "http://").replace(
        "$$HOSTNAME.${ROLLMESH_DOMAIN:-rollmesh.internal}", "$$HOSTNAME"
    )


def test_every_command_is_the_stacks_own_with_other_addresses() -> None:
    base, override = read("compose.yaml")["services"], read("compose.tls.yaml")["services"]
    for name in (name for name in override if "command" in override[name] and name != "keys"):
        assert plain(override[name]["command"]) == base[name]["command"], name
    untouched = [name for name in base if "http://" in str(base[name].get("command")) and name not in override]
    assert untouched == []


def test_every_service_has_its_certificate_and_is_asked_for_over_tls() -> None:
    base, override = read("compose.yaml")["services"], read("compose.tls.yaml")["services"]
    for name in SERVING:
        service = override[name]
        assert service["environment"]["ROLLMESH_TLS_DIR"] == "/run/tls"
        assert [volume.partition(":/")[2] for volume in service["volumes"]] == ["run/tls:ro"]
        assert plain(service["healthcheck"]["test"]) == base[name]["healthcheck"]["test"]
    for name in ("environment", "prometheus"):
        assert override[name]["volumes"][0].endswith("/ca.pem:/run/tls/ca.pem:ro"), "clients get no key"
    for name in set(base) - {*SERVING, "environment", "prometheus", "keys"}:
        assert name not in override
    made = override["keys"]["command"][0]
    for name in (*SERVING, "127.0.0.1", "*.${ROLLMESH_DOMAIN:-rollmesh.internal}"):
        assert f",{name}" in made


def test_prometheus_scrapes_the_same_over_tls() -> None:
    before, after = read("prometheus/prometheus.yml"), read("prometheus/prometheus.tls.yml")
    for job in after["scrape_configs"]:
        assert job.pop("scheme") == "https"
        assert job.pop("tls_config")["ca_file"] == "/run/tls/ca.pem"
    assert after == before
