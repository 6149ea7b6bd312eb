"""A section of the configuration tree: unknown keys are refused, defaults are checked too."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from services.wire.errors import UsageError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


def changed_fields(section: BaseModel) -> dict[str, object]:
    """The fields whose values are not their defaults."""
    fields = type(section).model_fields
    return {name: value for name, value in section if value != fields[name].default}


def idle(name: str, value: object, under: str, remedy: str) -> UsageError:
    """For a setting of the trainer that would be read by nobody."""
    return UsageError(f"trainer.{name}={value} would have no effect under {under}", remedy)
