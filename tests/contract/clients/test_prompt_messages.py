"""Prompts that are chat messages: said to a rollout server in the model's template, judged by the reward service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.environments.registry import make_task
from clients.environments.rewards import RewardsAddress
from clients.rollout.client import RolloutClient
from clients.runner.agent_episodes import EpisodeLimits
from clients.runner.groups import in_dialect, play_to_end
from services.wire.errors import UsageError
from services.wire.packed import unpack_mask, unpack_tokens
from tests.support.agent_playing import SAMPLING, open_group, playing
from tests.support.chat_policy import build_chat_tokenizer
from tests.support.rewards_host import judging

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 1 more?"},
]
JUDGE = """
def asked(answer, messages, solution):
    return float(messages[-1]["content"] == "And 1 more?" and len(messages) == 4 and solution == "6")
"""


async def test_the_whole_conversation_opens_the_episode_and_is_judged(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conversation_judge.py").write_text(JUDGE)
    rows = [{"chat": [*CONVERSATION[:-1], {"role": "user", "content": "Hm?"}], "solution": "0"}]
    held_out, train = tmp_path / "held_out.jsonl", tmp_path / "train.jsonl"
    held_out.write_text(json.dumps(rows[0]) + "\n")
    train.write_text(json.dumps({"chat": CONVERSATION, "solution": "6"}) + "\n")
    monkeypatch.chdir(tmp_path)
    async with judging({"name": "asked", "function": "conversation_judge:asked"}) as rewards:
        task = make_task(f"prompts:{train}?prompt=chat&held_out={held_out}", RewardsAddress(str(rewards.base_url)))
        assert task.dialect == "auto"
        async with playing(redis_url, run_id, chat_policy) as (host, client), task.environment as environment:  # type: ignore[union-attr]
            chatting = await in_dialect(client, environment, task.dialect)
            group = await open_group(client, 2)
            problem = chatting.problem("train", 0, 1)
            played = await play_to_end(client, chatting, group, problem, SAMPLING, EpisodeLimits(10.0))
            published = await host.published()
    assert [one.ended.reward for one in played] == [1.0, 1.0]
    tokenizer = build_chat_tokenizer()
    for trajectory in published:
        (segment,) = trajectory.segments
        tokens, sampled = unpack_tokens(segment.token_ids), unpack_mask(segment.loss_mask)
        said = tokenizer.decode(tokens[sampled == 0].tolist())
        assert said.startswith(tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True))


async def test_a_model_without_a_template_cannot_be_asked_messages(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": CONVERSATION}) + "\n")
    task = make_task(f"prompts:{tmp_path / 'rows.jsonl'}")
    async with playing(redis_url, run_id, tiny_policy) as (_, client):
        assert isinstance(client, RolloutClient)
        with pytest.raises(UsageError, match="no chat template"):
            await in_dialect(client, task.environment, task.dialect)
