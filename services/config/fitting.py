"""Settings that suit the run's model where nobody set them, and where each setting of a run came from.

file, command line ──► settings ── model folder ──► settings in force ──► config.toml, a comment a line
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from services.config.settings import RunSettings
from services.host.run_folder import is_complete
from services.policies.training.model_defaults import FITTED, ModelFacts, fitting
from services.wire.errors import UNDECODABLE, NoModelError

SettingsT = TypeVar("SettingsT", bound=BaseModel)


_HEADER_BYTES = 100_000_000
"""The longest header that safetensors itself reads."""


class _Text(msgspec.Struct):
    max_position_embeddings: int | None = None


class _Configuration(_Text):
    text_config: _Text = msgspec.field(default_factory=_Text)


class _Tensor(msgspec.Struct):
    shape: list[int] = []


def read_facts(folder: Path) -> ModelFacts:
    """What the folder's files say: without safetensors, that it has no parameters. Whoever loads it says what it lacks.

    Raises NoModelError for files that cannot be read.
    """
    try:
        configuration = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Configuration)
        parameters = sum(_parameters(file) for file in sorted(folder.glob("*.safetensors")))
    except (OSError, *UNDECODABLE) as error:
        raise NoModelError(folder, error) from error
    context = configuration.max_position_embeddings or configuration.text_config.max_position_embeddings
    return ModelFacts(parameters, context)


def _parameters(file: Path) -> int:
    """Of the header: its length as 8 bytes, then JSON (https://github.com/huggingface/safetensors#format)."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _HEADER_BYTES:
            raise msgspec.DecodeError(f"{file.name} is no safetensors file: its header would have {length} bytes")
        header = stream.read(length)
    tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    return sum(math.prod(tensor.shape) for name, tensor in tensors.items() if name != "__metadata__")


def fit(
    settings: RunSettings, facts: ModelFacts | None, *, cores: int, gpu: bool
) -> tuple[RunSettings, dict[str, str]]:
    """`settings` with what suits the model where nobody set it; dotted name → why, for what was changed.

    `facts`: of the model that was given, None where a tiny one is warm-started; `cores`: that this machine has.
    """
    changed: dict[str, str] = {}
    if facts is not None:
        for name, suiting in fitting(facts, adapters=settings.trainer.lora.rank > 0, gpu=gpu).items():
            if not is_set(settings, name):
                settings, changed[name] = with_value(settings, name, suiting.value), suiting.why
    if settings.trainer.threads == "auto":
        settings = settings.with_threads(cores, tiny=facts is None or facts.small)
        changed["trainer.threads"] = f"for {cores} cores"
    return settings, changed


def as_begun(settings: RunSettings, begun: RunSettings) -> RunSettings:
    """`settings` with the values of `begun` where nobody set what is fitted: this machine may be another than there."""
    for name in (*FITTED, "trainer.threads"):
        if not is_set(settings, name) or value_of(settings, name) == "auto":
            settings = with_value(settings, name, value_of(begun, name))
    return settings


def threads_of(settings: RunSettings, model: Path, cores: int) -> RunSettings:
    """With a number in place of `trainer.threads = auto`, for the model in this folder, which may still be made."""
    tiny = settings.model.path is None or (is_complete(model) and read_facts(model).small)
    return settings.with_threads(cores, tiny=tiny)


def is_set(settings: BaseModel, name: str) -> bool:
    """Whether somebody set the setting of this dotted name."""
    section = settings
    *sections, leaf = name.split(".")
    for each in sections:
        if each not in section.model_fields_set:
            return False
        section = getattr(section, each)
    return leaf in section.model_fields_set


def value_of(settings: BaseModel, name: str) -> object:
    """The value of the setting of this dotted name."""
    found: object = settings
    for each in name.split("."):
        found = found[each] if isinstance(found, Mapping) else getattr(found, each)
    return found


def with_value(settings: SettingsT, name: str, value: object) -> SettingsT:
    """A copy in which the setting of this name, of a section, has another value."""
    section, _, leaf = name.partition(".")
    tree: dict[str, Any] = {section: getattr(settings, section).model_copy(update={leaf: value})}
    return settings.model_copy(update=tree)


def annotated(text: str, origins: Mapping[str, str]) -> str:
    """TOML `text` with a comment behind each setting that `origins` (dotted name → words) names."""
    lines, section = [], ""
    for line in text.splitlines():
        key, equals, value = line.partition(" = ")
        if line.startswith("["):
            section = f"{line.strip('[]')}."
        elif equals and not key.startswith(" ") and value != "[" and section + key in origins:
            line = f"{line}  # {origins[section + key]}"
        lines.append(line)
    return "\n".join(lines) + "\n"
