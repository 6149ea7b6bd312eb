"""HTTP bodies of what operators ask of services."""

from __future__ import annotations

from typing import Literal

from services.wire.rollout_api import Body


class Draining(Body):
    """`POST /admin/drain`: it has begun."""

    server_id: str
    state: Literal["draining"]
