"""Reading a file of lines while another process writes it, from where reading stopped last time."""

from __future__ import annotations

from pathlib import Path


class LineTail:
    """A line whose end is not written yet is read next time, or never, where its writer cuts it off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new_lines(self) -> list[bytes]:
        """The whole lines that were added, without their ends; none where there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.splitlines()
