"""How long clients wait for what grows with the model, or with its answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic_core import to_json

from clients.rollout.sync_client import SyncRolloutClient
from clients.weights.client import WeightsClient
from services.wire.rollout_api import TakeTurns, Turn, TurnsTaken
from services.wire.weights_api import UpdateView, VerifyView, VersionsView, VersionView

GB = 10**9


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Path → how long an operator's client waits for it."""
    found: dict[str, Any] = {}
    one = VersionView(version=1, state="committed", root_digest="00", nbytes=100 * GB)
    answers = {
        "/v1/versions": VersionsView(latest=1, versions=[one]),
        "/v1/snapshots": UpdateView(version=2, state="staging", root_digest="00", engines=[]),
        "/groups/g/turns": TurnsTaken(results=[]),
        "/v1/verify": VerifyView(version=1, root_digest="00", engines=[], match=True),
    }

    def request(_: httpx.Client, method: str, url: str, *, timeout: Any, **__: Any) -> httpx.Response:
        path = url.removeprefix("http://127.0.0.1:1")
        found[path] = timeout
        asked = httpx.Request(method, f"http://bus{path}")
        return httpx.Response(200, content=to_json(answers[path]), request=asked)

    monkeypatch.setattr(httpx.Client, "request", request)
    return found


def test_an_operator_waits_longer_for_larger_models(waited: dict[str, Any], tmp_path: Path) -> None:
    with WeightsClient("http://127.0.0.1:1") as weights:
        weights.push("/nowhere")
        assert waited["/v1/snapshots"] == 600.0
        (tmp_path / "model.safetensors").touch()
        os.truncate(tmp_path / "model.safetensors", 200 * GB)
        weights.push(str(tmp_path))
        assert waited["/v1/snapshots"] == 2000.0
        weights.verify()
        assert waited["/v1/verify"] == 4000.0


def test_a_player_waits_as_long_as_the_server_says_that_a_turn_may_take(waited: dict[str, Any]) -> None:
    turns = TakeTurns(turns=[Turn(session_id="s", text="x")])
    with SyncRolloutClient("http://127.0.0.1:1") as client:
        client.take_turns("g", turns)
        assert waited["/groups/g/turns"] == 120.0
        client.take_turns("g", turns, 2168.0)
        assert waited["/groups/g/turns"] == 2168.0
