"""`verifier = "json-schema"`: the JSON of an answer holds to a schema, by the library jsonschema.

Looked for: the last fenced block that is JSON, the whole answer, else the last object or array that stands in it.
"""

from __future__ import annotations

import json
from typing import Any

from jsonschema.validators import validator_for

from services.rewards.verifiers.text import fenced, without_thoughts

_NOTHING = object()


def judge(answer: str, schema: dict[str, Any] | str) -> float:
    """`schema`: an object, or its JSON. Raises SchemaError for one that is no schema."""
    wanted = json.loads(schema) if isinstance(schema, str) else schema
    kind = validator_for(wanted)
    kind.check_schema(wanted)
    found = data_of(without_thoughts(answer))
    return float(found is not _NOTHING and kind(wanted).is_valid(found))


def data_of(said: str) -> object:
    """The data of an answer; `_NOTHING` where there is none."""
    blocks = [text for language, text in fenced(said) if language in ("", "json", "json5", "jsonc")]
    for text in [*reversed(blocks), said]:
        found = _read(text)
        if found is not _NOTHING:
            return found
    decoder = json.JSONDecoder(parse_constant=_refused)
    place, last = 0, _NOTHING
    while (place := _next_opening(said, place)) >= 0:
        try:
            last, place = decoder.raw_decode(said, place)
        except ValueError:
            place += 1
        except RecursionError:
            break
    return last


def _read(text: str) -> object:
    try:
        return json.loads(text.strip(), parse_constant=_refused)
    except (ValueError, RecursionError):
        return _NOTHING


def _refused(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _next_opening(text: str, start: int) -> int:
    places = [place for place in (text.find("{", start), text.find("[", start)) if place >= 0]
    return min(places, default=-1)
