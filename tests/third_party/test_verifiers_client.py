"""verifiers' train client, unmodified and in an environment of its own, against the token route."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.rollout_host import Host
from tests.support.telling_engine import TellingEngine, spell
from tests.third_party.sessions import opened

PYTHON = Path(__file__).parents[2] / ".venv-verifiers" / "bin" / "python"
PROGRAM = Path(__file__).with_name("verifiers_train_client.py")
ANSWERS = 'let me see\n<tool_call>\n{"name":  "weather", "arguments": {}}\n</tool_call>', "it is fine"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=".venv-verifiers is missing: ./dev test makes it")


async def run(base_url: str, key: str, model: Path, *trace_id: str) -> dict[str, Any]:
    """What the client read, told by its process."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-P", PROGRAM, base_url, str(model), *trace_id),
        env=os.environ | {"ROLLOUT_KEY": key, "HF_HUB_OFFLINE": "1"},
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
    read: dict[str, Any] = json.loads(output)
    return read


def check(read: dict[str, Any], engine: TellingEngine) -> None:
    """Ids and logprobs that the client read are those that were sampled, and its own trace says the same."""
    first, second = read["turns"]
    for turn, sampled in zip((first, second), engine.sampled, strict=True):
        assert turn["prompt_ids"] == sampled.prompt
        assert turn["completion_ids"] == sampled.token_ids
        assert turn["logprobs"] == sampled.logprobs
    assert (first["content"], first["finish_reason"], first["bridged"]) == ("let me see", "tool_calls", False)
    assert (second["content"], second["finish_reason"], second["bridged"]) == ("it is fine", "stop", True)
    assert {(request.sampling.temperature, request.sampling.seed) for request in engine.requests} == {(0.5, 3)}


async def test_outside_sessions_the_client_reads_what_was_sampled(
    host: Host, engine: TellingEngine, chat_policy: Path
) -> None:
    engine.tell(*map(spell, ANSWERS))
    check(await run(f"{host.url}/v1", "anything", chat_policy), engine)


@pytest.mark.parametrize("named", ["url", "trace"])
async def test_in_a_session_its_bridged_turns_are_one_segment_and_its_trace_is_ours(
    host: Host, engine: TellingEngine, chat_policy: Path, named: str
) -> None:
    # verifiers names each rollout in a header: a session of that name takes its calls.
    session = await opened(host, session_id="trace-1")
    engine.tell(*map(spell, ANSWERS))
    read = (
        await run(session.base_url, session.api_key, chat_policy)
        if named == "url"
        else await run(f"{host.url}/v1", "anything", chat_policy, "trace-1")
    )
    check(read, engine)
    (segment,) = await session.segments()
    assert read["trace"] == {"token_ids": segment["token_ids"], "mask": segment["loss_mask"]}
    await session.ends_with(engine.sampled)
