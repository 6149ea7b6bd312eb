"""Routes that take or answer a msgspec struct: its schema in the document of routes, and its JSON, defined once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Response
from pydantic import BaseModel

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_REFERENCE, _DEFINED = "#/$defs/", "$defs"


def answers(kind: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    """A route's argument `responses`: what it answers with status 200. Raises as `schema_of` does."""
    return {200: {"content": {"application/json": {"schema": schema_of(kind)}}}}


def takes(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A route's argument `openapi_extra`: its body, which it reads itself. Raises as `schema_of` does."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(kind)}}}}


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Its OpenAPI schema, the structs in it written out in place: FastAPI knows only pydantic's models.

    Raises RecursionError for a struct that holds itself.
    """
    schema = msgspec.json.schema(kind, schema_hook=_of_model)
    whole: dict[str, Any] = _inlined(schema, schema.get(_DEFINED, {}))
    return whole


def _of_model(kind: type[Any]) -> dict[str, Any]:
    """Of a model of pydantic within a struct."""
    if not issubclass(kind, BaseModel):
        raise NotImplementedError(f"{kind} has no schema")
    return kind.model_json_schema(ref_template=_REFERENCE + "{model}")


def struct_answer(found: msgspec.Struct | DataclassInstance, status_code: int = 200) -> Response:
    """The JSON of a struct, or of a dataclass; NaN is null."""
    return Response(msgspec.json.encode(found), status_code=status_code, media_type="application/json")


def _inlined(schema: Any, defined: dict[str, Any]) -> Any:
    """In place of each reference what it names: the document's own references start at its root, not at this schema."""
    if isinstance(schema, list):
        return [_inlined(each, defined) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(defined[schema["$ref"].removeprefix(_REFERENCE)], defined)
    return {name: _inlined(each, defined) for name, each in schema.items() if name != _DEFINED}
