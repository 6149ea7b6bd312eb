"""Settings of kept rollouts (`rollmesh samples`, the dashboard)."""

from __future__ import annotations

from pydantic import Field

from services.config.base import Section


class SampleSettings(Section):
    """Which rollouts are kept in the run folder, to be read."""

    share: float = Field(
        default=1.0, ge=0.0, le=1.0, description="Share of each step's groups that are kept, whole; 0: none"
    )
    max_bytes: int = Field(
        default=1 << 30, ge=1 << 20, description="Bytes that they take on disk at most: the oldest make room"
    )
    cpu_share: float = Field(
        default=0.005,
        gt=0.0,
        le=1.0,
        description="Share of a core that keeping them takes: fewer are kept where steps are short; 1: whatever it takes",
    )
