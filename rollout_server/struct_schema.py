"""The OpenAPI schema of answers that are msgspec structs: FastAPI knows only pydantic's."""

from __future__ import annotations

from typing import Any

import msgspec

_REFERENCE = "#/structs/"


def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON schema of a struct with every struct in it written out in place. Not for recursive ones."""
    (schema,), parts = msgspec.json.schema_components([struct], ref_template=_REFERENCE + "{name}")

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(parts[str(node["$ref"]).removeprefix(_REFERENCE)])
        return {key: resolve(value) for key, value in node.items()}

    resolved: dict[str, Any] = resolve(schema)
    return resolved
