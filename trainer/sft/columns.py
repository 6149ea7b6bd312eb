"""Rows of a table as examples: which columns make one, and what each must hold. No torch here.

chat             messages, and tools where there are any         {"messages": [{"role": "user", "content": "…"}, …]}
prompt-answer    two texts                                       {"prompt": "…", "answer": "…"}
tokens           ids, and which of them are learned              {"tokens": [5, 9, 2], "mask": [0, 1, 1]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from services.config.base import changed_fields
from services.wire.errors import UsageError
from services.wire.tasks.tables import Row, columns_of
from trainer.sft.sft_settings import DataSettings, Kind

Message = dict[str, Any]
"""As the data says it: `role`, `content` and what chat templates read besides."""
Tools = list[dict[str, Any]]
_ValueT = TypeVar("_ValueT")


@dataclass(frozen=True)
class Chat:
    messages: list[Message]
    tools: Tools | None = None


@dataclass(frozen=True)
class PromptAnswer:
    prompt: str
    answer: str


@dataclass(frozen=True)
class TokenExample:
    """`mask`: as many as `tokens`, true where a token is learned."""

    tokens: list[int]
    mask: list[bool]


Example = Chat | PromptAnswer | TokenExample


@dataclass(frozen=True)
class Examples:
    """All of one kind. `names`: of each, where it stands, for errors."""

    kind: Kind
    each: Sequence[Example]
    names: Sequence[str]


def read_examples(path: Path, rows: Sequence[Row], data: DataSettings) -> Examples:
    """Raises UsageError for columns that are missing or may mean several things, and for values of another kind."""
    kind = kind_of(path, columns_of(rows), data)
    makers: dict[Kind, Callable[[str, Row, DataSettings], Example]] = {
        "chat": _chat,
        "prompt-answer": _prompt_answer,
        "tokens": _tokens,
    }
    make = makers[kind]
    names = [f"{path}, row {number}" for number in range(1, len(rows) + 1)]
    return Examples(kind, [make(name, row, data) for name, row in zip(names, rows, strict=True)], names)


def kind_of(path: Path, columns: Sequence[str], data: DataSettings) -> Kind:
    """What examples are, by the settings and the columns that are there. Raises UsageError where that is not clear."""
    there = ", ".join(map(repr, columns))
    kinds: tuple[Kind, ...] = get_args(Kind)
    needed = {kind: _columns_of(kind, data) for kind in kinds}
    named = {name for name in changed_fields(data) if name != "kind"}
    asked: list[Kind] = [data.kind] if data.kind != "auto" else [kind for kind in needed if named & needed[kind].keys()]
    if len(asked) > 1:
        raise UsageError(f"columns of {' and of '.join(asked)} are named: an example is one of them", "set data.kind")
    if asked:
        missing = [f"{column!r} (data.{name})" for name, column in needed[asked[0]].items() if column not in columns]
        if missing:
            raise UsageError(f"{path} has no column {' and no '.join(missing)}", f"its columns are {there}")
        return asked[0]
    found = [kind for kind, by_name in needed.items() if set(by_name.values()) <= set(columns)]
    if len(found) > 1:
        raise UsageError(f"the columns of {path}, {there}, may be {' or '.join(found)}", f"set data.kind={found[0]}")
    if not found:
        wanted = "; ".join(f"{kind}: {', '.join(map(repr, by_name.values()))}" for kind, by_name in needed.items())
        raise UsageError(
            f"{path} has the columns {there}, which make no example ({wanted})",
            "name yours: data.messages=…, or data.prompt=… data.answer=…, or data.tokens=… data.mask=…",
        )
    return found[0]


def _columns_of(kind: Kind, data: DataSettings) -> dict[str, str]:
    """Name of the setting → column, of those that the kind needs."""
    names = {"chat": ("messages",), "prompt-answer": ("prompt", "answer"), "tokens": ("tokens", "mask")}[kind]
    return {name: str(getattr(data, name)) for name in names}


def _chat(name: str, row: Row, data: DataSettings) -> Chat:
    messages = _value(name, row, data.messages, list[Message], "a list of messages, {role, content}")
    tools = row.get(data.tools)
    if isinstance(tools, str):
        # As text where rows have different schemas, which a column of Parquet cannot hold.
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UsageError(f"{name}: column {data.tools!r} is no JSON ({error})", "write a list of tools") from error
    if not tools:
        return Chat(messages)
    return Chat(messages, _value(name, {data.tools: tools}, data.tools, Tools, "a list of tools"))


def _prompt_answer(name: str, row: Row, data: DataSettings) -> PromptAnswer:
    prompt, answer = (_value(name, row, column, str, "text") for column in (data.prompt, data.answer))
    return PromptAnswer(prompt, answer)


def _tokens(name: str, row: Row, data: DataSettings) -> TokenExample:
    tokens = _value(name, row, data.tokens, list[int], "a list of token ids")
    mask = _value(name, row, data.mask, list[bool | int], "a list of 0 and 1")
    if len(mask) != len(tokens):
        raise UsageError(
            f"{name}: {len(tokens)} tokens in {data.tokens!r}, {len(mask)} values in {data.mask!r}", "give as many"
        )
    if any(value not in (0, 1) for value in mask):
        raise UsageError(
            f"{name}: {data.mask!r} holds something else than 0 and 1", "1 where a token is learned, else 0"
        )
    return TokenExample(tokens, [bool(value) for value in mask])


def _value(name: str, row: Row, column: str, kind: type[_ValueT], wanted: str) -> _ValueT:
    if row.get(column) is None:
        raise UsageError(f"{name} has no {column!r}", f"give it {wanted}, or leave the row out")
    try:
        return msgspec.convert(row[column], kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: column {column!r} does not hold {wanted} ({error})", "mend the row") from error
