"""A taskset of verifiers, played by our adapter in verifiers' own environment against a real rollout server."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.wire.packed import unpack_mask
from tests.support.rollout_host import Host
from tests.support.telling_engine import TellingEngine, spell

PYTHON = Path(__file__).parents[2] / ".venv-verifiers" / "bin" / "python"
PROGRAM = Path(__file__).with_name("verifiers_play.py")

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=".venv-verifiers is missing: ./dev test makes it")


async def play(url: str, home: Path) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-P", PROGRAM, url),
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(home)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 90.0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-4000:]
    told: dict[str, Any] = json.loads(output)
    return told


async def test_a_taskset_of_verifiers_is_played_and_captured(host: Host, engine: TellingEngine, tmp_path: Path) -> None:
    engine.tell(spell("nothing"))
    told = await play(host.url, tmp_path)
    for sibling in told["siblings"]:
        assert sibling["reward"] == len("nothing")
        assert sibling["components"] == {"letters": 7.0, "turns": 2.0}
    train, held_out, both = told["prompts"]
    assert train + held_out == 60
    assert held_out > 0
    assert both == 0
    assert "cont" in told["refused"][0]
    assert "no-such-taskset" in told["refused"][1]
    assert told["heavy"] == []
    trajectories = await host.published()
    assert len(trajectories) == 2
    for one in trajectories:
        assert one.task == "verifiers:two-questions"
        assert one.reward == 7.0
        (segment,) = one.segments
        mask = unpack_mask(segment.loss_mask).tolist()
        assert sum(1 for before, now in zip([0, *mask], mask, strict=False) if now > before) == 2
        assert [sampling.temperature for sampling in one.samplings] == [0.7]
