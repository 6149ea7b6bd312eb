"""What `rollmesh formula --json` says of a choice of loss and advantage."""

from __future__ import annotations

from typing import Any

import msgspec


class Formula(msgspec.Struct, frozen=True):
    """`loss`, `advantage`: settings of algorithms of the user's own, with their defaults."""

    formula: str
    loss: dict[str, Any]
    advantage: dict[str, Any]
