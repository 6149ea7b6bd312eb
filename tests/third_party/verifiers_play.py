"""Our clients playing a taskset of verifiers, run by the Python of verifiers' own environment (`.venv-verifiers`).

python verifiers_play.py ROLLOUT_URL      opens a group of two, plays it, JSON on standard output
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

# Neither the project nor the taskset is installed there.
sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).with_name("verifiers_tasks"))]

from clients.environments.adapters.verifiers import VerifiersEnvironment
from clients.environments.registry import make_task
from clients.rollout.client import RolloutClient
from clients.runner.agent_episodes import EpisodeLimits
from clients.runner.groups import play_to_end
from services.wire.errors import UsageError
from services.wire.rollout_api import OpenGroup, SamplingBody


def refused(task: str) -> str:
    try:
        make_task(task)
    except UsageError as error:
        return str(error)
    return "nothing"


async def main(url: str) -> None:
    environment = make_task("verifiers:two-questions?count=60").environment
    assert isinstance(environment, VerifiersEnvironment)
    splits = [{environment.problem(split, index, 1).prompt for index in range(100)} for split in ("train", "held_out")]
    problem = environment.problem("train", 3, 1)
    sampling = SamplingBody(max_tokens=12, temperature=0.7)
    async with environment, RolloutClient(url) as client:
        group = await client.open_group(OpenGroup(task=environment.name, group_size=2, sampling=sampling))
        siblings = await play_to_end(client, environment, group, problem, sampling, EpisodeLimits(60.0))
    told = {
        "prompt": problem.prompt,
        "prompts": [len(splits[0]), len(splits[1]), len(splits[0] & splits[1])],
        "siblings": [{"reward": one.ended.reward, "components": dict(one.ended.components)} for one in siblings],
        "refused": [refused(f"verifiers:{name}") for name in ("two-questions?cont=3", "no-such-taskset")],
        "heavy": sorted({"torch", "vllm"} & set(sys.modules)),
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
