"""An agent of the openai-agents package as a training environment: eight lines more than the agent itself.

$ rollmesh up --task python:docs/examples/sdk_agent.py:weather model.path=FOLDER

`by_hand`: the same for a program that runs its agents itself.
"""

import random

from agents import Agent, ModelBehaviorError, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from clients.environments.adapters.openai_agents import openai_agent_environment
from clients.environments.base import AgentEndpoint, Ended, Problem, Split, agent_environment

CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Quito", "Perth", "Delhi", "Osaka", "Turin", "Izmir"]


# The agent. It knows nothing of training.
@function_tool
def weather_of(city: str) -> str:
    """The weather of a city."""
    return f"{20 + len(city)} degrees in {city}"


AGENT = Agent(name="Forecaster", instructions="Be brief. Use the tool.", tools=[weather_of])


# What makes it an environment: problems, and a reward for what the agent answered.
def problem(split: Split, index: int, seed: int) -> Problem:
    city = random.Random(f"{split}/{index}/{seed}").choice(CITIES[:8] if split == "train" else CITIES[8:])
    return Problem(split, index, prompt=f"How warm is it in {city}?", solution=str(20 + len(city)))


def judge(problem: Problem, answer: str) -> float:
    return float(problem.solution in answer)


weather = openai_agent_environment("weather", AGENT, problem, judge)


# By hand.
async def play(problem: Problem, endpoint: AgentEndpoint) -> Ended:
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        provider = OpenAIProvider(openai_client=client, use_responses=False)
        config = RunConfig(model="policy", model_provider=provider, tracing_disabled=True)
        try:
            result = await Runner.run(AGENT, problem.prompt, run_config=config)
        except ModelBehaviorError:  # it called a tool that is not there, or wrongly
            return Ended(reward=0.0, success=False)
    right = problem.solution in str(result.final_output)
    return Ended(reward=float(right), success=right)


by_hand = agent_environment("by-hand", problem, play)
