"""The calls that `rollmesh serve` prints."""

from __future__ import annotations

from pathlib import Path

from services.config.load import load_settings
from services.host.run_folder import RunFolder
from services.security.keys import NO_PLACES, KeyPlaces
from services.supervisor.launch_plan import LaunchPlan, MeshPorts, plan_launch
from services.supervisor.serve import example_calls

PORTS = MeshPorts(redis=1, bus=2, gateway=8000, rewards=4, servers=(5,), teacher=6, dashboard=7)


def planned(keys: KeyPlaces) -> LaunchPlan:
    settings = load_settings(None, ["gateway.enabled=always", "engine=torch", "model.path=model", "trainer.threads=1"])
    return plan_launch(settings, RunFolder(Path("run")), "r", PORTS, keys)


def test_calls_have_what_keys_and_certificates_ask_for_and_no_key() -> None:
    keys = KeyPlaces(Path("/my keys"), None, Path("/tls"))
    first, second = example_calls(planned(keys), keys)
    for call in (first, second):
        assert call.startswith("curl -s --cacert /tls/ca.pem ")
        assert "\"authorization: Bearer $(cat '/my keys/agent.key')\"" in call
    assert " https://127.0.0.1:8000/sessions " in first
    assert " https://127.0.0.1:8000/sessions/hello/v1/completions " in second
    open_plane = example_calls(planned(NO_PLACES), NO_PLACES)
    assert not any("Bearer" in call or "--cacert" in call for call in open_plane)
    assert all(" http://127.0.0.1:8000/sessions" in call for call in open_plane)
