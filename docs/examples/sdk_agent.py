"""An agent of the openai-agents package as a training environment: ten lines more than the agent itself.

$ rollmesh up --task python:docs/examples/sdk_agent.py:weather model.path=FOLDER

`unchanged`: the same of an agent that names no model.
"""

import random

from agents import Agent, OpenAIChatCompletionsModel, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from clients.environments.base import AgentEndpoint, Ended, Problem, Split, agent_environment

CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Quito", "Perth", "Delhi", "Osaka", "Turin", "Izmir"]


# The agent. It knows nothing of training.
@function_tool
def weather_of(city: str) -> str:
    """The weather of a city."""
    return f"{20 + len(city)} degrees in {city}"


def forecaster(client: AsyncOpenAI) -> Agent:
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    return Agent(name="Forecaster", instructions="Be brief. Use the tool.", tools=[weather_of], model=model)


# What makes it an environment: problems, and a reward for what the agent answered.
def problem(split: Split, index: int, seed: int) -> Problem:
    city = random.Random(f"{split}/{index}/{seed}").choice(CITIES[:8] if split == "train" else CITIES[8:])
    return Problem(split, index, prompt=f"How warm is it in {city}?", solution=str(20 + len(city)))


async def play(problem: Problem, endpoint: AgentEndpoint) -> Ended:
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        result = await Runner.run(forecaster(client), problem.prompt, run_config=RunConfig(tracing_disabled=True))
    right = problem.solution in str(result.final_output)
    return Ended(reward=float(right), success=right)


weather = agent_environment("weather", problem, play)


AGENT = Agent(name="Forecaster", instructions="Be brief. Use the tool.", tools=[weather_of])


async def play_unchanged(problem: Problem, endpoint: AgentEndpoint) -> Ended:
    provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key, use_responses=False)
    config = RunConfig(model="policy", model_provider=provider, tracing_disabled=True)
    result = await Runner.run(AGENT, problem.prompt, run_config=config)
    right = problem.solution in str(result.final_output)
    return Ended(reward=float(right), success=right)


unchanged = agent_environment("unchanged", problem, play_unchanged)
