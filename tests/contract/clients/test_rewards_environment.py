"""Prompts of a file, played on a real rollout server and judged by a real reward service; the documents' example too."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients.environments.adapters.prompts import Prompts
from clients.environments.base import AgentEndpoint, Ended, Problem, Split, split_of
from clients.environments.registry import make_task
from clients.environments.rewards import RewardsAddress, RewardsClient, recorded
from clients.rollout.client import RolloutClient
from clients.runner.agent_episodes import EpisodeLimits, Lost
from clients.runner.evaluation import Terms
from clients.runner.failures import GroupLostError
from clients.runner.groups import evaluate_group, play_to_end
from clients.runner.runner import RunnerPlan, run_environment
from clients.runner.tasks import PlayedTask
from services.config.load import load_settings
from services.config.rewards import ModelScoring, RewardComponent
from services.wire.errors import UsageError
from services.wire.packed import unpack_mask, unpack_tokens
from services.wire.reward_api import JudgeSample, RewardFailedError
from services.wire.rollout_api import OpenGroup, SamplingBody
from tests.conftest import free_port
from tests.support.rewards_host import judging
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from trainer.sft.tiny_model import build_tokenizer

ROOT = Path(__file__).parents[3]
FUNCTIONS = """
def length(answer, fails):
    if fails: raise ValueError("cannot tell")
    return len(answer)
def shaky(answer): raise ValueError("never")
"""
COMPONENTS: list[dict[str, Any]] = [
    {"name": "length", "function": "prompt_judges:length"},
    {"name": "shaky", "function": "prompt_judges:shaky", "weight": 2.0, "substitute": 0.25},
]
ROWS = [{"prompt": f"{number:04d}=", "fails": number % 5 == 0} for number in range(60)]
SAMPLING = SamplingBody(max_tokens=4)
LIMITS = EpisodeLimits(20.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "prompt_judges.py").write_text(FUNCTIONS)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@asynccontextmanager
async def mesh(redis_url: str, run_id: str, model: Path) -> AsyncIterator[tuple[Host, httpx.AsyncClient]]:
    settings, engine = small_batch(k=9, batch=4), ScriptedEngine(answer_length=2)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=model, settings=settings) as host:
        async with judging(*COMPONENTS) as rewards:
            yield host, rewards


def prompts(folder: Path, rewards: httpx.AsyncClient, options: str = "") -> Prompts:
    made = make_task(f"prompts:{folder / 'rows.jsonl'}{options}", RewardsAddress(str(rewards.base_url))).environment
    assert isinstance(made, Prompts)
    return made


async def test_a_run_without_reward_code_records_components_and_never_trains_on_a_missing_reward(
    folder: Path, redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    async with mesh(redis_url, run_id, tiny_policy) as (host, rewards):
        plan = RunnerPlan(
            tasks=[PlayedTask(prompts(folder, rewards, "?success=2.5"), max_tokens=4)],
            seed=3,
            group_size=2,
            concurrency=4,
            evaluation=Terms(8),
            run_dir=folder,
            retries=1,
            start_deadline_s=20.0,
        )
        running = asyncio.create_task(run_environment([host.url], plan))
        async with asyncio.timeout(40.0):
            while (await host.ledger.accounts()).closed_groups < 30:
                assert not running.done(), "the runner ended before the run had concluded"
                await asyncio.sleep(0.02)
        await host.ledger.conclude(0)
        await asyncio.wait_for(running, 20.0)
        published, accounts = await host.published(), await host.ledger.accounts()

    tokenizer, fails = build_tokenizer(), {row["prompt"]: row["fails"] for row in ROWS}
    assert published
    for trajectory in published:
        (segment,) = trajectory.segments
        tokens, sampled = unpack_tokens(segment.token_ids), unpack_mask(segment.loss_mask)
        assert fails[tokenizer.decode(tokens[sampled == 0].tolist())] is False
        said = tokenizer.decode(tokens[sampled == 1].tolist(), skip_special_tokens=True)
        success = trajectory.reward_components["success"]
        assert trajectory.reward_components == {
            "length": float(len(said)),
            "shaky": 0.25,
            "shaky.substituted": 1.0,
            "success": success,
        }
        assert trajectory.reward == len(said) + 0.5
        assert success == float(trajectory.reward >= 2.5)
    assert accounts.dropped_groups > 0, "groups without a reward are counted, not trained"
    assert len(published) == 2 * (accounts.closed_groups - accounts.dropped_groups)
    report = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert 0.0 < report["success_after"] < 1.0, "what could not be judged counts as not solved"


class Asking:
    """An agent that has its own answer judged."""

    name = "asking"

    def __init__(self, rewards: RewardsClient, fails: bool) -> None:
        self.rewards, self.fails = rewards, fails

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return Problem(split, index, prompt="0001=")

    async def play(self, problem: Problem, endpoint: AgentEndpoint) -> Ended:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {endpoint.api_key}"}) as http:
            said = await http.post(f"{endpoint.base_url}/completions", json={"model": "m", "prompt": problem.prompt})
            said.raise_for_status()
        given = await self.rewards.judge(JudgeSample(prompt="p", answer="abc", metadata={"fails": self.fails}))
        return Ended(given.reward, True, given.components)


async def test_an_agent_may_ask_too_and_its_group_is_lost_to_the_reward(
    folder: Path, redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    async with mesh(redis_url, run_id, tiny_policy) as (host, http), RolloutClient(host.url) as client:
        async with RewardsClient(str(http.base_url)) as rewards:
            problem = Problem("train", 0, "0001=")
            group = await client.open_group(OpenGroup(task="t", group_size=2, sampling=SAMPLING))
            played = await play_to_end(client, Asking(rewards, False), group, problem, SAMPLING, LIMITS)
            assert [episode.ended.reward for episode in played] == [3.5, 3.5]
            group = await client.open_group(OpenGroup(task="t", group_size=2, sampling=SAMPLING))
            with pytest.raises(GroupLostError, match="cannot tell") as lost:
                await play_to_end(client, Asking(rewards, True), group, problem, SAMPLING, LIMITS)
            assert lost.value.cause == "reward"
            assert (await host.ledger.accounts()).dropped_groups == 1
            opening = OpenGroup(task="t", group_size=2, sampling=SAMPLING, purpose="evaluate")
            group = await client.open_group(opening)
            apart = await evaluate_group(client, Asking(rewards, True), group, [problem] * 2, SAMPLING, LIMITS)
            assert [isinstance(one, Lost) and one.cause for one in apart] == ["reward", "reward"]


async def test_whatever_keeps_a_reward_away_is_a_missing_reward(folder: Path) -> None:
    sample = JudgeSample(prompt="p", answer="abc", metadata={"fails": False})
    async with RewardsClient(f"http://127.0.0.1:{free_port()}", patience_s=0.2) as away:
        with pytest.raises(RewardFailedError, match="cannot be reached"):
            await away.judge(sample)
    async with judging(*COMPONENTS, key="k" * 20) as http:
        url = str(http.base_url)
        async with RewardsClient(url) as stranger, RewardsClient(url, api_key="k" * 20) as known:
            with pytest.raises(RewardFailedError, match="no valid key"):
                await stranger.judge(sample)
            given = await known.judge(sample)
            assert (given.reward, given.substituted) == (3.5, {"shaky": "raised"})
            assert (await known.formula()).formula == "reward = 1·length + 2·shaky"


def test_each_prompt_is_played_once_before_any_is_played_again(folder: Path) -> None:
    environment = make_task(f"prompts:{folder / 'rows.jsonl'}").environment
    for split in ("train", "held_out"):
        of_split = {row["prompt"] for row in ROWS if split_of(row["prompt"]) == split}
        rounds = [
            [environment.problem(split, index + start, 7).prompt for index in range(len(of_split))]  # type: ignore[arg-type]
            for start in (0, len(of_split))
        ]
        assert [set(played) for played in rounds] == [of_split, of_split]
        if split == "train":
            assert rounds[0] != rounds[1]
            assert rounds[0] != [environment.problem(split, index, 8).prompt for index in range(len(of_split))]


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ('{"prompt": "a"}\n{"question": "b"}', "", "row 2 has no 'prompt'"),
        ('{"prompt": "a"}\nno json', "", "line 2"),
        ('{"prompt": "a"}', "?sucess=1", "did you mean 'success'"),
        ('{"prompt": "a"}', "?success=high", "is no number"),
        ('{"question": "a", "answer": "b"}', "", "no column 'prompt'.*prompt=; there are: question, answer"),
        ('{"prompt": "a"}', "?solution=answer", "no column 'answer'"),
        ('{"prompt": "a", "solution": "b"}', "?extract=#### (.*)", "row 1: extract='#### .*' matches nothing of 'b'"),
        ('{"prompt": "a", "solution": "b"}', "?extract=(", "no regular expression"),
        ('{"prompt": "a"}', "?extract=a", "row 1 has no solution"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "",
            "is the assistant's",
        ),
        ('{"prompt": [{"role": "user"}]}', "", "is no message"),
        ('{"prompt": [{"role": "user", "content": "a"}]}', "?dialect=text", "are chat messages"),
        ('{"prompt": ["a"]}', "", "neither a text nor a list of messages"),
        (None, "", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_played_is_refused(tmp_path: Path, text: str | None, options: str, words: str) -> None:
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=words):
        make_task(f"prompts:{file}{options}")


async def test_nobody_to_judge_is_told_before_anything_is_played(folder: Path) -> None:
    environment = make_task(f"prompts:{folder / 'rows.jsonl'}").environment
    assert isinstance(environment, Prompts)
    with pytest.raises(UsageError, match="nobody to judge"):
        await environment.__aenter__()


async def test_the_documents_examples_give_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    examples = ROOT / "docs/examples"
    function, asking = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    configured = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)[0]
    assert function in (examples / "word_rewards.py").read_text(encoding="utf-8")
    assert configured in (examples / "word_rewards.toml").read_text(encoding="utf-8")
    asked = re.search(r"-d '(.*?)'\n(\{.*?\})\n```", text)
    assert asked is not None
    monkeypatch.chdir(examples)
    settings = load_settings(examples / "word_rewards.toml", []).rewards
    async with judging(*(each.model_dump(exclude_none=True) for each in settings.components)) as http:
        answer = await http.post("/v1/rewards", content=asked[1], headers={"content-type": "application/json"})
        assert answer.json() == json.loads(asked[2])

        async def solve(prompt: str, endpoint: AgentEndpoint) -> str:
            return prompt[::-1]

        names: dict[str, Any] = {**globals(), "os": os, "recorded": recorded, "solve": solve}
        exec(compile(asking, "docs/rewards.md", "exec"), names)
        monkeypatch.setenv("ROLLMESH_REWARDS_URL", str(http.base_url))
        ended = await names["play"](Problem("train", 0, "abc", solution="cba"), None)
        assert ended == Ended(1.17, True, {"exact": 1.0, "short": 0.85})


def test_every_key_of_a_component_is_in_the_document() -> None:
    text = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `([a-z_.]+)` \|", text, flags=re.MULTILINE))
    keys = set(RewardComponent.model_fields) - {"model"} | {f"model.{key}" for key in ModelScoring.model_fields}
    assert told == keys
