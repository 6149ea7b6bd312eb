"""What a model folder holds, as far as its files say without loading it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from services.policies.diagnosis.plan import ModelFiles
from services.policies.training.model_shape import ModelShape, shape_of
from services.wire.errors import UNDECODABLE


class _Vocabulary(msgspec.Struct):
    type: str = ""
    vocab: msgspec.Raw = msgspec.Raw()


class _Added(msgspec.Struct):
    content: str


class _Tokenizer(msgspec.Struct):
    """A tokenizer.json has one: `model`, which holds the vocabulary."""

    model: _Vocabulary
    added_tokens: list[_Added] = []


def read_model_files(folder: Path) -> ModelFiles:
    """Raises nothing: what cannot be read is said in its fields."""
    shape: ModelShape | None = None
    tokenizer = _tokenizer(folder)
    try:
        configuration = json.loads((folder / "config.json").read_bytes())
        unusable = None if isinstance(configuration, dict) else "it is no JSON object"
    except (OSError, ValueError) as error:
        configuration, unusable = None, _why(error)
    if isinstance(configuration, dict):
        try:
            shape = shape_of(configuration)
        except ValueError:
            shape = None
    return ModelFiles(
        folder=str(folder),
        config=unusable,
        tokenizer=tokenizer if isinstance(tokenizer, str) else None,
        weights=sum(1 for suffix in ("safetensors", "bin") for _ in folder.glob(f"*.{suffix}")),
        chat_template=_has_template(folder),
        shape=shape,
        characters=None if isinstance(tokenizer, str) else _characters(tokenizer),
    )


def _tokenizer(folder: Path) -> _Tokenizer | str:
    """Or why it cannot be read."""
    try:
        return msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_Tokenizer)
    except (OSError, *UNDECODABLE) as error:
        return _why(error)


def _characters(tokenizer: _Tokenizer) -> frozenset[str] | None:
    """Of one with whole words for tokens, each of which is a character. A special token in a prompt is no character."""
    if tokenizer.model.type != "WordLevel":
        return None
    special = {added.content for added in tokenizer.added_tokens}
    try:
        words = msgspec.json.decode(tokenizer.model.vocab, type=dict[str, int]).keys() - special
    except UNDECODABLE:
        return None
    return frozenset(words) if all(len(word) == 1 for word in words) else None


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists():
        return True
    try:
        return b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes()
    except OSError:
        return False


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is not there"
    if isinstance(error, OSError):
        return str(error.strerror)
    return f"it cannot be read ({next(iter(str(error).splitlines()), type(error).__name__)})"


def weight_file_bytes(folder: Path) -> int:
    """Of a model folder's weights; 0 where there are none, or they cannot be looked at from here."""
    try:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except OSError:
        return 0
