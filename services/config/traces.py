"""Settings of tracing, which environment variables of a process override.

telemetry.traces = "otlp"           ROLLMESH_TRACES=otlp
telemetry.traces_endpoint = "…"     ROLLMESH_TRACES_ENDPOINT=…
telemetry.traces_ratio = 0.1        ROLLMESH_TRACES_RATIO=0.1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

from pydantic import Field, ValidationError

from services.config.base import Section
from services.wire.errors import UsageError

TraceTarget = Literal["off", "console", "otlp"]
_PREFIX = "ROLLMESH_"


class TraceSettings(Section):
    traces: TraceTarget = Field(
        default="off", description="Where traces go: nowhere, a JSON line a span on standard error, or OTLP over HTTP"
    )
    traces_endpoint: str = Field(
        default="http://127.0.0.1:4318/v1/traces", description="Where a collector takes OTLP over HTTP"
    )
    traces_ratio: float = Field(
        default=1.0, ge=0.0, le=1.0, description="Share of the groups that are traced; all optimizer steps are"
    )


SettingsT = TypeVar("SettingsT", bound=TraceSettings)


def with_environ(settings: SettingsT, environ: Mapping[str, str]) -> SettingsT:
    """`settings` with the environment variables applied. Raises UsageError for an invalid value."""
    given = {name: environ[_variable(name)] for name in TraceSettings.model_fields if environ.get(_variable(name))}
    if not given:
        return settings
    try:
        checked = TraceSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        what = f"{_variable(name)}={given.get(name)} is no setting ({first['msg']})"
        raise UsageError(what, "see telemetry in docs/configuration.md") from error
    return settings.model_copy(update={name: getattr(checked, name) for name in given})


def as_environ(settings: TraceSettings) -> dict[str, str]:
    """Environment variables that pass these settings to another process; none where traces are off."""
    if settings.traces == "off":
        return {}
    return {_variable(name): str(getattr(settings, name)) for name in TraceSettings.model_fields}


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"
