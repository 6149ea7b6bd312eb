"""Chats to learn a format from: sums asked in words, answered as `3 + 8 = 11`, and a second question about the result.

$ python docs/examples/sum_chats.py 500 > chats.jsonl
$ rollmesh sft --model smollm2-135m --data chats.jsonl --out models/sums
"""

import json
import random
import sys

NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana")
THINGS = ("apples", "books", "coins", "eggs", "letters", "pens", "shells", "tickets")
FIRST = (
    "{name} has {a} {things} and gets {b} more. How many {things} are there now?",
    "There are {a} {things} on the table, and {name} adds {b}. How many is that?",
    "{name} counted {a} {things} in the morning and {b} in the evening. How many in all?",
)
SECOND = ("And with {c} more?", "Then {name} finds another {c}. How many now?", "Now add {c} to that.")


def chat(numbers: random.Random) -> dict[str, object]:
    a, b, c = (numbers.randint(1, 20) for _ in range(3))
    words = {"name": numbers.choice(NAMES), "things": numbers.choice(THINGS), "a": a, "b": b, "c": c}
    turns = [
        ("user", numbers.choice(FIRST).format(**words)),
        ("assistant", f"{a} + {b} = {a + b}"),
        ("user", numbers.choice(SECOND).format(**words)),
        ("assistant", f"{a + b} + {c} = {a + b + c}"),
    ]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


if __name__ == "__main__":
    source = random.Random(1)
    for _ in range(int(sys.argv[1])):
        sys.stdout.write(json.dumps(chat(source)) + "\n")
