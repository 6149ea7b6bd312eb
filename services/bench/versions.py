"""The versions of what was measured, as far as it is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def versions(*names: str) -> dict[str, str]:
    """By distribution; those that are not installed are left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
