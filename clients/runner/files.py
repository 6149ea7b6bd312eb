"""Files that the runner leaves in the run folder."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write atomically, a line feed behind it: a reader never sees a partial file."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content + b"\n")
    partial.replace(path)
