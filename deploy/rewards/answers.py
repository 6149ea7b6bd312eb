"""The stack's reward functions: put yours here and name them in deploy/mesh.toml (docs/rewards.md)."""

from __future__ import annotations


def exact(answer: str, solution: str) -> float:
    """1 for the solution, 0 for anything else. `solution` comes from the sample's metadata."""
    return float(answer.strip() == solution)
