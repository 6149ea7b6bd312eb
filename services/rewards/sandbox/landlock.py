"""Files of a call without a mount namespace, as in a container: Landlock lets it read `files.View`, and write nothing.

Modes, owners and times are not Landlock's: the call's filter refuses to change those.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from services.rewards.sandbox import kernel
from services.rewards.sandbox.files import DEVICES, View, around
from services.wire.errors import UsageError

_EXECUTE, _WRITE, _READ, _READ_DIR, _TRUNCATE = 1, 2, 4, 8, 1 << 14
# How many kinds of access the first five versions of the interface know; later ones as many as the fifth.
_KINDS = (13, 14, 15, 15, 16)
_SCOPES_VERSION, _SCOPES = 6, 3
_NETWORK_VERSION = 4
_MOST_PATHS = 500
_OF_PROC = ("cpuinfo", "meminfo", "stat", "version", "filesystems", "sys/vm/overcommit_memory", "sys/kernel/osrelease")


class FileRules:
    """Opened once by the worker, laid on each call. Descriptors stay open as long as the worker."""

    def __init__(self, view: View, version: int, *, execute: bool) -> None:
        """`version`: of Landlock's interface, at least 1."""
        self._version = version
        self._handled = (1 << _KINDS[min(version, len(_KINDS)) - 1]) - 1
        read = _READ | (_EXECUTE if execute else 0)
        self._rules: list[tuple[int, int]] = []
        paths = [path for root in view.shown for path in around(root, view.hidden)]
        if len(paths) > _MOST_PATHS:
            raise UsageError(
                f"{len(paths)} files and folders lie beside the keys ({', '.join(map(str, view.hidden))})",
                "keep the keys outside of the folders that functions are loaded from",
            )
        for path in paths:
            self._allow(path, read | (_READ_DIR if path.is_dir() else 0))
        for root in view.shown:
            if root not in paths and root.is_dir():
                self._allow(root, _READ_DIR)
        for name in _OF_PROC:
            self._allow(Path("/proc", name), _READ)
        for name in DEVICES:
            self._allow(Path("/dev", name), _READ | _WRITE | _TRUNCATE)

    def restrict(self) -> None:
        """Hold this process, a call's, to the rules."""
        attributes = struct.pack("=Q", self._handled)
        if self._version >= _NETWORK_VERSION:
            attributes += struct.pack("=Q", 0)
        if self._version >= _SCOPES_VERSION:
            attributes += struct.pack("=Q", _SCOPES)
        ruleset = kernel.landlock_ruleset(attributes)
        for descriptor, access in self._rules:
            kernel.landlock_allow(ruleset, access, descriptor)
        own = os.open("/proc/self", os.O_PATH)
        kernel.landlock_allow(ruleset, _READ | _READ_DIR, own)
        kernel.landlock_restrict(ruleset)
        os.close(own)
        os.close(ruleset)

    def _allow(self, path: Path, access: int) -> None:
        try:
            self._rules.append((os.open(path, os.O_PATH), access & self._handled))
        except OSError:
            return  # Not there, or not to be seen by this user: then not by a call either.
