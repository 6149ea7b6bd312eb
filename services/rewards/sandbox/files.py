"""Which files a call may read: the system's programs and libraries, Python's, the function's folder, and what settings add.

Everything else is not there for it: home folders, keys, other services' data, sockets, devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/nix/store", "/sys/devices/system"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/os-release"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime", "/etc/timezone", "/etc/locale.alias"),
    *("/etc/hosts", "/etc/host.conf", "/etc/resolv.conf", "/etc/gai.conf", "/etc/protocols", "/etc/services"),
    *("/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/openssl.cnf", "/etc/ca-certificates", "/etc/pki/tls/certs"),
    *(
        "/etc/pki/tls/openssl.cnf",
        "/etc/pki/ca-trust/extracted",
        "/etc/crypto-policies",
        "/etc/mime.types",
        "/etc/fonts",
    ),
)
# Too much, or made anew for each call.
_NEVER_WHOLE = {Path(each) for each in ("/", "/proc", "/dev", "/sys", "/etc", "/run", "/var", "/tmp")}


@dataclass(frozen=True)
class View:
    """`shown`: real paths, none below another. `links`: names that lead to them. `hidden`: real paths below shown ones."""

    shown: tuple[Path, ...]
    links: Mapping[Path, Path]
    hidden: tuple[Path, ...]


def view_of(wanted: Iterable[Path], hidden: Iterable[Path]) -> View:
    """What there is of `wanted`, without what there is of `hidden`."""
    secrets = {each.resolve() for each in hidden if each.exists()}
    links: dict[Path, Path] = {}
    real: set[Path] = set()
    for path in wanted:
        absolute = path.absolute()
        target = absolute.resolve()
        if target in _NEVER_WHOLE or not target.exists() or any(_is_at_or_below(target, each) for each in secrets):
            continue
        real.add(target)
        if target != absolute:
            links[absolute] = target
    shown = outermost(real)
    below = [each for each in outermost(secrets) if any(_is_at_or_below(each, root) for root in shown)]
    return View(tuple(shown), links, tuple(below))


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Without those that lie below another, in order."""
    kept: list[Path] = []
    for path in sorted(set(paths), key=lambda each: each.parts):
        if not kept or not _is_at_or_below(path, kept[-1]):
            kept.append(path)
    return kept


def wanted_by_python(folder: str) -> list[Path]:
    """The system, this interpreter with all that it has loaded, and `folder`."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sys.path}
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    modules = {file.rpartition("/")[0] for each in list(sys.modules.values()) if (file := _file_of(each))}
    named = [*_SYSTEM, *python, *libraries, *modules, folder]
    return [Path(each) for each in named if each.startswith("/")]


def _file_of(module: object) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else ""


def around(root: Path, hidden: Iterable[Path]) -> list[Path]:
    """What lies below `root`, or `root` itself, without `hidden`: no path returned has one of those below it."""
    inside = [each for each in hidden if _is_at_or_below(each, root)]
    if not inside:
        return [root]
    if root in inside:
        return []
    # What a symbolic link leads to is found by its own name, or not at all.
    return [path for each in sorted(root.iterdir()) if not each.is_symlink() for path in around(each, inside)]


def _is_at_or_below(path: Path, root: Path) -> bool:
    return path == root or root in path.parents
