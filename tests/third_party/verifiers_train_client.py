"""Two turns each with verifiers' train client, run by the Python of its own environment (`.venv-verifiers`).

    python verifiers_train_client.py MODEL_FOLDER < CASES      JSON on standard output

`CASES`: JSON, a list of `base_url`, `key`, `trace_id` (may be null); one process for all, which takes long to import its
libraries. What it writes of each: for each turn what the client read, and the tokens and mask of the trace that verifiers
made of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from renderers import Qwen3RendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import Message, SamplingConfig, Tool, ToolMessage, UserMessage

TOOL = Tool(name="weather", description="The weather of a city", parameters={"type": "object", "properties": {}})


async def played(base_url: str, model_folder: str, trace_id: str | None) -> dict[str, Any]:
    """Ask, make the tool call that comes back, answer it, and ask once more."""
    client = TrainClient(
        TrainClientConfig(
            base_url=base_url,
            api_key_var="ROLLOUT_KEY",
            renderer=Qwen3RendererConfig(),
            renderer_model_name=model_folder,
        )
    )
    trace: Any = Trace(
        task=TraceTask(type="Weather", data=TaskData(prompt="how is the weather")),
        agent=AgentInfo(config=AgentConfig()),
    )
    prompt: list[Message] = [UserMessage(content="how is the weather in Oslo")]
    turns = []
    try:
        for follow_up in ("20 degrees", None):
            turn = prepare_turn(trace, prompt, [TOOL])
            response = await client.get_response(
                ChatDialect(),
                {"model": "chat-policy"},
                SamplingConfig(max_tokens=100, temperature=0.5, seed=3),
                session_id=trace_id or trace.id,
                turn=turn,
            )
            turn.commit(response)
            tokens = response.tokens
            turns.append(
                {
                    "prompt_ids": list(tokens.prompt_ids),
                    "completion_ids": list(tokens.completion_ids),
                    "logprobs": list(tokens.completion_logprobs),
                    "bridged": tokens.bridged,
                    "content": response.message.content,
                    "finish_reason": response.finish_reason,
                }
            )
            prompt = [*prompt, response.message]
            if follow_up is not None:
                (call,) = response.message.tool_calls or []
                prompt.append(ToolMessage(tool_call_id=call.id, content=follow_up))
    finally:
        await client.close()
    (branch,) = trace.branches
    whole = {"token_ids": list(branch.token_ids), "mask": [int(one) for one in branch.sampled_mask]}
    return {"turns": turns, "trace": whole}


async def main(model_folder: str) -> None:
    found = []
    for case in json.load(sys.stdin):
        os.environ["ROLLOUT_KEY"] = case["key"]
        found.append(await played(case["base_url"], model_folder, case["trace_id"]))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
