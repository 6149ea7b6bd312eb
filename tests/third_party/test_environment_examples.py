"""The docs' examples of environments do what they say, with the real `openai` package, on a real rollout server."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from clients.environments.adapters.openai_agents import openai_agent_environment
from clients.environments.base import Answer, AnyEnvironment, Ended, NextTurn, Problem, Split
from clients.environments.chat import ChatEnvironment
from clients.environments.registry import make_task
from clients.rollout.client import RolloutClient
from clients.runner.agent_episodes import EpisodeLimits
from clients.runner.groups import play_to_end
from services.config.load import load_settings
from services.wire.packed import unpack_mask
from services.wire.rollout_api import OpenGroup, SamplingBody
from tests.support.rollout_host import Host
from tests.support.telling_engine import TellingEngine, spell

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
DOCUMENT = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
SAMPLING = SamplingBody(max_tokens=100, temperature=0.5)


async def test_an_openai_agent_is_trained_by_changing_its_base_url_and_key(host: Host, engine: TellingEngine) -> None:
    pytest.importorskip("openai")
    environment = make_task(f"python:{EXAMPLES}/calculator_agent.py:calculator").environment
    problem = environment.problem("train", 0, 1)
    a, b = re.findall(r"\d+", problem.prompt)
    call = f'<tool_call>\n{{"name":  "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    engine.tell(spell(call), spell(f"It is {problem.solution}."))
    async with RolloutClient(host.url) as client:
        group = await client.open_group(OpenGroup(task=environment.name, group_size=1, sampling=SAMPLING))
        (played,) = await play_to_end(client, environment, group, problem, SAMPLING, EpisodeLimits(30.0))
    assert played.ended.success
    assert f"\n{problem.solution}\n</tool_response>" in "".join(
        host_text(request.prompt_token_ids) for request in engine.requests
    )
    (trajectory,) = await host.published()
    assert trajectory.reward == 1.0
    assert trajectory.reward_components["letters"] == float(len(f"It is {problem.solution}."))
    (segment,) = trajectory.segments
    mask = unpack_mask(segment.loss_mask).tolist()
    assert sum(mask) == sum(len(sample.token_ids) for sample in engine.sampled)
    assert sum(1 for before, now in zip([0, *mask], mask, strict=False) if now > before) == 2


@pytest.mark.parametrize("name", ["weather", "by_hand"])
async def test_an_agent_of_openai_agents_is_trained_as_it_is(name: str, host: Host, engine: TellingEngine) -> None:
    pytest.importorskip("agents")
    environment = make_task(f"python:{EXAMPLES}/sdk_agent.py:{name}").environment
    problem = environment.problem("train", 0, 1)
    city = problem.prompt.removeprefix("How warm is it in ").removesuffix("?")
    call = f'<tool_call>\n{{"name": "weather_of", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    engine.tell(spell(call), spell(f"It is {problem.solution} degrees."))
    async with RolloutClient(host.url) as client:
        group = await client.open_group(OpenGroup(task=environment.name, group_size=1, sampling=SAMPLING))
        (played,) = await play_to_end(client, environment, group, problem, SAMPLING, EpisodeLimits(30.0))
    assert played.ended.success
    (trajectory,) = await host.published()
    (segment,) = trajectory.segments
    assert sum(unpack_mask(segment.loss_mask).tolist()) == sum(len(sample.token_ids) for sample in engine.sampled)
    asked = {environment.problem("train", index, 1).prompt for index in range(200)}
    assert not asked & {environment.problem("held_out", index, 1).prompt for index in range(200)}
    if name == "weather":
        assert trajectory.reward_components == {"success": 1.0, "tool_calls": 1.0, "failed": 0.0}


@pytest.mark.parametrize("name", ["weather", "by_hand"])
async def test_an_agent_whose_model_calls_a_tool_that_is_not_there_is_trained_on_it(
    name: str, host: Host, engine: TellingEngine
) -> None:
    pytest.importorskip("agents")
    environment = make_task(f"python:{EXAMPLES}/sdk_agent.py:{name}").environment
    engine.tell(spell('<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>'))
    async with RolloutClient(host.url) as client:
        group = await client.open_group(OpenGroup(task=environment.name, group_size=1, sampling=SAMPLING))
        problem = environment.problem("train", 0, 1)
        (played,) = await play_to_end(client, environment, group, problem, SAMPLING, EpisodeLimits(30.0))
    assert (played.ended.reward, played.ended.success) == (0.0, False)
    (trajectory,) = await host.published()
    assert sum(len(unpack_mask(segment.loss_mask)) for segment in trajectory.segments) > 0
    if name == "weather":
        assert played.ended.components["failed"] == 1.0


async def test_an_agent_that_calls_without_end_is_trained_on_it_too(host: Host, engine: TellingEngine) -> None:
    agents = pytest.importorskip("agents")
    weather = make_task(f"python:{EXAMPLES}/sdk_agent.py:weather").environment
    agent = agents.Agent(name="a", tools=[agents.function_tool(echo)])
    environment = openai_agent_environment("endless", agent, weather.problem, lambda *_: 1.0, max_turns=3)
    engine.tell(*[spell('<tool_call>\n{"name": "echo", "arguments": {"word": "a"}}\n</tool_call>')] * 3)
    async with RolloutClient(host.url) as client:
        group = await client.open_group(OpenGroup(task="endless", group_size=1, sampling=SAMPLING))
        problem = environment.problem("train", 0, 1)
        (played,) = await play_to_end(client, environment, group, problem, SAMPLING, EpisodeLimits(30.0))
    assert (played.ended.reward, played.ended.success) == (0.0, False)
    assert played.ended.components == {"tool_calls": 3.0, "failed": 1.0}


def echo(word: str) -> str:
    """Says it again."""
    return word


class Counting:
    """Gives the number of sampled tokens."""

    name = "counting"
    reads_token_ids = True
    first_turn = "1+1="

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return Problem(split, index, prompt=self.first_turn)

    def start(self, problem: Problem) -> Counting:
        return self

    def respond(self, answer: Answer) -> Ended:
        return Ended(1.0, True, {"tokens": float(len(answer.token_ids)), "first": float(answer.token_ids[0])})


@pytest.mark.parametrize("environment", [Counting(), ChatEnvironment(Counting())], ids=["text", "chat"])
async def test_an_environment_that_reads_tokens_gets_those_that_were_sampled(
    environment: AnyEnvironment, host: Host, engine: TellingEngine
) -> None:
    engine.tell(spell("It is two."))
    problem = environment.problem("train", 0, 1)
    async with RolloutClient(host.url) as client:
        group = await client.open_group(OpenGroup(task="counting", group_size=1, sampling=SAMPLING))
        (played,) = await play_to_end(client, environment, group, problem, SAMPLING, EpisodeLimits(30.0))
    (sampled,) = (sample.token_ids for sample in engine.sampled)
    assert played.ended.components == {"tokens": float(len(sampled)), "first": float(sampled[0])}


def test_tutorials_show_the_examples_as_they_are() -> None:
    pages = [ROOT / "docs" / "tutorials" / name for name in ("your-environment.md", "your-agent.md")]
    tutorials = "".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = re.findall(r"^```python\n(.*?)^```", tutorials, flags=re.MULTILINE | re.DOTALL)
    names = ("larger.py", "calculator_agent.py", "sdk_agent.py", "sdk_agent.py")
    examples = [(EXAMPLES / name).read_text(encoding="utf-8") for name in names]
    for block, example in zip(blocks, examples, strict=True):
        assert all(function.strip() in example for function in block.split("\n\n\n"))


def host_text(token_ids: list[int]) -> str:
    from tests.support.telling_engine import chat_tokenizer

    return str(chat_tokenizer().decode(token_ids))


def test_products_of_the_splits_never_meet() -> None:
    environment = make_task(f"python:{EXAMPLES}/calculator_agent.py:calculator").environment
    train = {environment.problem("train", index, seed).solution for index in range(300) for seed in (1, 2)}
    held_out = {environment.problem("held_out", index, seed).solution for index in range(300) for seed in (1, 2)}
    assert not train & held_out


def test_the_environment_of_twenty_lines_gives_a_second_chance() -> None:
    environment = make_task(f"python:{EXAMPLES}/letters.py:Letters?longest=6").environment
    problem = environment.problem("train", 5, 1)
    episode = environment.start(problem)  # type: ignore[union-attr]
    assert episode.respond(Answer("zz", True)) == NextTurn("again:")
    assert episode.respond(Answer(problem.solution, True)) == Ended(0.5, True)
    first = environment.start(problem).respond(Answer(problem.solution, True))  # type: ignore[union-attr]
    assert first == Ended(1.0, True)


@pytest.mark.parametrize("example", ["calculator_agent.py", "letters.py"])
def test_the_document_shows_the_examples_as_they_are(example: str) -> None:
    code = (EXAMPLES / example).read_text(encoding="utf-8")
    shown = DOCUMENT.partition(f"({'examples/' + example})")[2].partition("```python\n")[2].partition("```")[0]
    assert shown.strip()
    assert shown in code


def test_the_documents_command_lines_are_understood() -> None:
    lines = re.findall(r"^\$ rollmesh up(.*)$", DOCUMENT, flags=re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        flag, task, *rest = shlex.split(line)
        assert flag == "--task"
        assert load_settings(None, [f'task="{task}"', *rest]).task == task
