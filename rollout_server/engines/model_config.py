"""What a model folder's configuration says, read without torch or transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.wire.errors import UsageError


def eos_token_ids(model: Path) -> tuple[int, ...]:
    """The model's end-of-sequence ids, from generation_config.json and config.json."""
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        ids = read_json(model / name).get("eos_token_id") if (model / name).exists() else None
        for token in ids if isinstance(ids, list) else [ids]:
            if isinstance(token, int):
                found[token] = None
    return tuple(found)


def vocabulary_size(model: Path) -> int:
    """How many token ids the model has. Raises UsageError for a folder that does not tell."""
    try:
        config = read_json(model / "config.json")
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{model} is no model folder ({error!r})", "give the folder of what the engine serves"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded
