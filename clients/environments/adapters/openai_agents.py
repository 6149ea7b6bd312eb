"""An agent of the openai-agents package as an environment: problems and a judgement are all that it needs.

    problem.prompt ─► Runner.run(agent): the policy answers in place of its model ─► judge(problem, output) ─► Ended
                           └── the model calls a tool that is not there, or too often ─► reward 0, and it is trained

Every agent of the run, those that it hands over to included, speaks to the policy, whichever model it names. Nothing is
traced. Beside the reward stand `tool_calls` (of the episode) and `failed` (1 where the run broke off).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clients.environments.base import AgentEndpoint, AgentEnvironment, Ended, Problem, ProblemOf, agent_environment

Judge = Callable[[Problem, Any], float | Ended]


def openai_agent_environment(
    name: str, agent: Any, problem: ProblemOf, judge: Judge, *, max_turns: int = 10
) -> AgentEnvironment:
    """`agent`: an `agents.Agent`. `judge(problem, output)` is asked for each final output: a string, unless the agent has
    an output type. It gives the reward, of which 1 or more counts as solved, or an `Ended`. `max_turns`: the most calls
    of the model in an episode.

    Raises ModuleNotFoundError, when it is played, without the package openai-agents.
    """

    async def play(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        from agents import MaxTurnsExceeded, ModelBehaviorError, OpenAIProvider, RunConfig, Runner
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        async with AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            http_client=DefaultAsyncHttpxClient(verify=endpoint.verify),
        ) as client:
            config = RunConfig(
                model="policy",
                model_provider=OpenAIProvider(openai_client=client, use_responses=False),
                tracing_disabled=True,
            )
            try:
                result = await Runner.run(agent, problem.prompt, run_config=config, max_turns=max_turns)
            except (ModelBehaviorError, MaxTurnsExceeded) as error:
                told = error.run_data
                calls = 0.0 if told is None else _tool_calls(told.new_items)
                return Ended(0.0, success=False, components={"tool_calls": calls, "failed": 1.0})
        judged = judge(problem, result.final_output)
        ended = judged if isinstance(judged, Ended) else Ended(float(judged), success=judged >= 1.0)
        beside = {"tool_calls": _tool_calls(result.new_items), "failed": 0.0, **ended.components}
        return Ended(ended.reward, ended.success, beside)

    return agent_environment(name, problem, play)


def _tool_calls(items: list[Any]) -> float:
    return float(sum(item.type == "tool_call_item" for item in items))
