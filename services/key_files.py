"""Keys are given by file, never on a command line, where every process of the machine could read them."""

from __future__ import annotations

from pathlib import Path

from services.wire.errors import UsageError

_SHORTEST = 16


def read_key(path: Path) -> str:
    """The key in a file, without the spaces around it. Raises UsageError for a file that holds no usable key."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"no key can be read from {path} ({error})", "give a file with one line of ASCII") from error
    if len(key) < _SHORTEST or any(character.isspace() for character in key):
        raise UsageError(
            f"{path} holds a key of {len(key)} characters", f"give one of {_SHORTEST} or more, without spaces"
        )
    return key
