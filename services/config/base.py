"""A section of the configuration tree: unknown keys are refused, defaults are checked too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from services.wire.errors import UsageError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_no_path(cls, given: Any) -> Any:
        """An empty text is not the present folder, which `Path` makes of it, but none."""
        if not isinstance(given, dict):
            return given
        optional = {name for name, field in cls.model_fields.items() if field.annotation == Path | None}
        return {name: None if name in optional and value == "" else value for name, value in given.items()}


def changed_fields(section: BaseModel) -> dict[str, object]:
    """The fields whose values are not their defaults."""
    fields = type(section).model_fields
    return {name: value for name, value in section if value != fields[name].default}


def idle(name: str, value: object, under: str, remedy: str) -> UsageError:
    """For a setting of the trainer that would be read by nobody."""
    return UsageError(f"trainer.{name}={value} would have no effect under {under}", remedy)
