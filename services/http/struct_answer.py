"""Routes that answer a msgspec struct: its schema in the document of routes, and its JSON, without a second definition."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response

_REFERENCE, _DEFINED = "#/$defs/", "$defs"


def answers(kind: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    """A route's argument `responses`: what it answers with status 200. Structs that hold themselves have no such schema:
    RecursionError."""
    schema = msgspec.json.schema(kind)
    whole = _inlined(schema, schema.get(_DEFINED, {}))
    return {200: {"content": {"application/json": {"schema": whole}}}}


def struct_answer(found: msgspec.Struct) -> Response:
    """The JSON of a struct; NaN is null."""
    return Response(msgspec.json.encode(found), media_type="application/json")


def _inlined(schema: Any, defined: dict[str, Any]) -> Any:
    """In place of each reference what it names: the document's own references start at its root, not at this schema."""
    if isinstance(schema, list):
        return [_inlined(each, defined) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(defined[schema["$ref"].removeprefix(_REFERENCE)], defined)
    return {name: _inlined(each, defined) for name, each in schema.items() if name != _DEFINED}
