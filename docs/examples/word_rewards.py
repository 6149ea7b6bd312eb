"""Reward functions of docs/rewards.md: plain Python, nothing of rollmesh is imported."""

from __future__ import annotations


def exact(answer: str, solution: str) -> float:
    """1 for the solution, 0 for anything else. `solution` comes from the sample's metadata."""
    return float(answer.strip() == solution)


def short(answer: str, complete: bool, longest: int = 20) -> float:
    """1 for no characters at all, 0 for `longest` and more, or for an answer that was cut off."""
    return max(0.0, 1.0 - len(answer) / longest) if complete else 0.0
