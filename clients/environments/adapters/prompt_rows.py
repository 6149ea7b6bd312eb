"""Rows of a table as prompts: which column is what, and what of a row its judges are handed.

{"question": "2 + 3?", "answer": "… #### 5"}  ──prompt=question, solution=answer, extract=#### (.*)──►
    prompt "2 + 3?", metadata {"solution": "5"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from clients.environments.base import Message
from services.wire.errors import UsageError
from services.wire.tasks.tables import Row, columns_of, read_table

SOLUTION = "solution"
"""What judges know the solution's column as."""


@dataclass(frozen=True)
class Columns:
    """`prompt`: the column that is said. `instruction` stands behind each prompt.

    `solution`: the column that judges get as `solution`, None for one that is named so, if any. Of it, with `extract`, they
    get the last match of a regular expression: of its first group, where it has one.
    """

    prompt: str = "prompt"
    solution: str | None = None
    instruction: str = ""
    extract: re.Pattern[str] | None = None


@dataclass(frozen=True)
class PromptRow:
    """`key`: the prompt alone, as text. `messages`: the whole conversation that opens, None where that is one text."""

    key: str
    prompt: str
    messages: tuple[Message, ...] | None
    metadata: Mapping[str, object]


def read_prompts(file: Path, columns: Columns) -> list[PromptRow]:
    """In the order of the file.

    Raises UsageError, with the columns that there are, for a table that lacks one, and with the row for one that does not
    fit: a prompt is a text, or a list of messages of which the last is not the assistant's.
    """
    rows = read_table(file)
    there = columns_of(rows)
    for option, column in (("prompt", columns.prompt), ("solution", columns.solution)):
        if column is not None and column not in there:
            raise UsageError(
                f"{file} has no column {column!r}", f"name the right one by {option}=; there are: {', '.join(there)}"
            )
    return [_prompt(row, columns, f"{file}, row {number}") for number, row in enumerate(rows, 1)]


def _prompt(row: Row, columns: Columns, where: str) -> PromptRow:
    metadata = {column: value for column, value in row.items() if column != columns.prompt}
    if columns.solution is not None:
        metadata[SOLUTION] = metadata.pop(columns.solution, None)
        if metadata[SOLUTION] is None:
            raise UsageError(f"{where} has no {columns.solution!r}", "give each row a solution")
    if columns.extract is not None:
        metadata[SOLUTION] = _extracted(metadata.get(SOLUTION), columns.extract, where)
    said = row.get(columns.prompt)
    if isinstance(said, str):
        return PromptRow(said, _behind(said, columns.instruction), None, metadata)
    messages = _messages(said, columns.prompt, where)
    key = msgspec.json.encode(messages).decode()
    last = messages[-1]
    messages = (*messages[:-1], {**last, "content": _behind(last["content"], columns.instruction)})
    return PromptRow(key, key, messages, metadata)


def _behind(text: str, instruction: str) -> str:
    return f"{text}{'' if instruction[:1].isspace() else ' '}{instruction}" if instruction else text


def _extracted(solution: object, pattern: re.Pattern[str], where: str) -> str:
    if not isinstance(solution, str | int | float):
        raise UsageError(f"{where} has no solution that a text could be taken out of", "name its column by solution=")
    found = list(pattern.finditer(str(solution)))
    if not found or not (text := found[-1].group(min(1, pattern.groups))):
        raise UsageError(
            f"{where}: extract={pattern.pattern!r} matches nothing of {str(solution)[-80:]!r}", "correct the expression"
        )
    return text.strip()


def _messages(said: object, column: str, where: str) -> tuple[Message, ...]:
    if said is None:
        raise UsageError(f"{where} has no {column!r}", "give each row a prompt")
    if not isinstance(said, Sequence) or not said or not all(isinstance(one, Mapping) for one in said):
        raise UsageError(f"{where}: {column!r} is neither a text nor a list of messages", "name another column")
    # Tables with columns of one shape hold None where a message has no such key.
    messages: list[dict[str, Any]] = [{key: one[key] for key in one if one[key] is not None} for one in said]
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UsageError(f"{where}: {message!r} is no message", 'write {"role": "user", "content": "…"}')
    if messages[-1]["role"] == "assistant":
        raise UsageError(f"{where}: the last message is the assistant's", "leave out what the policy is to say")
    return tuple(messages)
