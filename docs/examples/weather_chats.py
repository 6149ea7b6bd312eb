"""Chats that show a model how the tool of `sdk_agent.py` is called, and what to say then. Of other cities than training's.

$ ./dev run python docs/examples/weather_chats.py 200 > chats.jsonl
$ ./dev sft --model models/tools --data chats.jsonl --out models/taught
"""

import json
import random
import sys

from sdk_agent import AGENT, weather_of

CITIES = ("Accra", "Bonn", "Brno", "Dakar", "Doha", "Graz", "Hanoi", "Kyiv", "Lagos", "Malmo", "Nice", "Porto", "Riga")
TOOL = {"name": weather_of.name, "description": weather_of.description, "parameters": weather_of.params_json_schema}


def chat(city: str, degrees: int) -> dict[str, object]:
    call = {"name": weather_of.name, "arguments": json.dumps({"city": city})}
    messages = [
        {"role": "system", "content": AGENT.instructions},
        {"role": "user", "content": f"How warm is it in {city}?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": f"{degrees} degrees in {city}"},
        {"role": "assistant", "content": f"{degrees} degrees."},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}


if __name__ == "__main__":
    source = random.Random(1)
    for _ in range(int(sys.argv[1])):
        sys.stdout.write(json.dumps(chat(source.choice(CITIES), source.randint(5, 35))) + "\n")
