"""verifiers' train client, unmodified and in an environment of its own, against the token route."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.rollout_host import Host
from tests.support.telling_engine import Sampled, TellingEngine, spell
from tests.third_party.sessions import opened

PYTHON = Path(__file__).parents[2] / ".venv-verifiers" / "bin" / "python"
PROGRAM = Path(__file__).with_name("verifiers_train_client.py")
ANSWERS = 'let me see\n<tool_call>\n{"name":  "weather", "arguments": {}}\n</tool_call>', "it is fine"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=".venv-verifiers is missing: ./dev test makes it")


async def run(model: Path, *cases: dict[str, str | None]) -> list[dict[str, Any]]:
    """What the client read of each case, told by its process."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-P", PROGRAM, str(model)),
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(json.dumps(cases).encode()), 90.0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-4000:]
    read: list[dict[str, Any]] = json.loads(output)
    return read


def check(read: dict[str, Any], sampled: Sequence[Sampled]) -> None:
    """Ids and logprobs that the client read are those that were sampled, and its own trace says the same."""
    first, second = read["turns"]
    for turn, own in zip((first, second), sampled, strict=True):
        assert turn["prompt_ids"] == own.prompt
        assert turn["completion_ids"] == own.token_ids
        assert turn["logprobs"] == own.logprobs
    assert (first["content"], first["finish_reason"], first["bridged"]) == ("let me see", "tool_calls", False)
    assert (second["content"], second["finish_reason"], second["bridged"]) == ("it is fine", "stop", True)


async def test_in_a_session_and_outside_the_client_reads_what_was_sampled(
    host: Host, engine: TellingEngine, chat_policy: Path
) -> None:
    """In a session its bridged turns are one segment, and its trace is ours: the session is named by the URL, or by the
    name of the rollout, which verifiers puts into a header."""
    by_url = await opened(host, session_id="session-1")
    by_trace = await opened(host, session_id="trace-1")
    engine.tell(*map(spell, 3 * ANSWERS))
    api = f"{host.url}/v1"
    outside, *inside = await run(
        chat_policy,
        {"base_url": api, "key": "anything", "trace_id": None},
        {"base_url": by_url.base_url, "key": by_url.api_key, "trace_id": None},
        {"base_url": api, "key": "anything", "trace_id": "trace-1"},
    )
    assert {(request.sampling.temperature, request.sampling.seed) for request in engine.requests} == {(0.5, 3)}
    check(outside, engine.sampled[:2])
    for number, (session, read) in enumerate(zip((by_url, by_trace), inside, strict=True), start=1):
        sampled = engine.sampled[2 * number : 2 * number + 2]
        check(read, sampled)
        (segment,) = await session.segments()
        assert read["trace"] == {"token_ids": segment["token_ids"], "mask": segment["loss_mask"]}
        await session.ends_with(sampled)
