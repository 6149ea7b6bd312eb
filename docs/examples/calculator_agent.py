"""An existing OpenAI agent as a training environment: the agent is left as it was, given another base URL and key.

$ rollmesh up --task python:docs/examples/calculator_agent.py:calculator model.path=FOLDER
"""

import json
import random

from openai import AsyncOpenAI

from clients.environments.base import AgentEndpoint, Ended, Problem, Split, agent_environment

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "The product of two whole numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


# The agent. It knows nothing of training: any OpenAI client, any framework would do.
async def solve(question: str, client: AsyncOpenAI) -> str:
    """Answer the question, with the calculator as often as the model asks for it, four times at most."""
    messages = [{"role": "user", "content": question}]
    for _ in range(4):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def multiply(arguments: str) -> str:
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"the calculator does not understand: {error}"


# What makes it an environment: problems, and a reward for what the agent answered.
def problem(split: Split, index: int, seed: int) -> Problem:
    """Odd products are trained on, even ones held out: no held-out product was ever a training problem."""
    numbers = random.Random(f"{split}/{index}/{seed}")
    a, b = (2 * numbers.randrange(5, 50) + (split == "train") for _ in range(2))
    return Problem(split, index, prompt=f"What is {a} times {b}?", solution=str(a * b))


async def play(problem: Problem, endpoint: AgentEndpoint) -> Ended:
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        answer = await solve(problem.prompt, client)
    right = problem.solution in answer
    return Ended(reward=float(right), success=right, components={"letters": float(len(answer))})


calculator = agent_environment("calculator", problem, play)
