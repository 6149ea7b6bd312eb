"""`./dev docs`: writes the pages that are made from the code, then builds the documentation as a site.

    code ──► docs/reference/{settings,commands,metrics,run-files,python,errors}.md    kept in git; a test compares them
    README, CHANGELOG, CONTRIBUTING, docs/, recipes/ ──► a copy ──► zensical ──► .dev/docs/site

Pages keep their places, so that a link works in a checkout and on the site alike. Nothing is loaded from a network, neither
by the build nor by a page.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from docs.reference_pages import references
from services.wire.errors import RollmeshError

ROOT = Path(__file__).parents[1]
COPIED = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs", "recipes", "deploy")
WITHIN_S = 300

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: ./dev docs --out site")
def docs(
    out: Annotated[Path, typer.Option(help="Folder that the site is written to")] = ROOT / ".dev" / "docs" / "site",
    only_pages: Annotated[
        bool, typer.Option("--only-pages", help="Write the pages made from the code, build nothing")
    ] = False,
) -> None:
    """Write the reference pages, and build the documentation as a site."""
    for path, text in references().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stderr.write(f"docs: wrote {path.relative_to(ROOT)}\n")
    if not only_pages:
        build(out)
        sys.stderr.write(f"docs: {out / 'index.html'}\n")


def build(out: Path) -> None:
    """The site in the folder `out`, in place of what is there. Raises RollmeshError with what is wrong in which page."""
    with tempfile.TemporaryDirectory(prefix="rollmesh-docs-") as scratch:
        folder = Path(scratch)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / "pages" / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (folder / "pages").mkdir(exist_ok=True)
                shutil.copy(ROOT / name, folder / "pages" / name)
        text = (ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8")
        (folder / "zensical.toml").write_text(
            text.replace("[project]\n", '[project]\ndocs_dir = "pages"\nsite_dir = "site"\n', 1), encoding="utf-8"
        )
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "zensical.toml"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        if done.returncode or not (folder / "site" / "index.html").is_file():
            raise RollmeshError("the documentation cannot be built", (done.stdout + done.stderr)[-4000:])
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / "site", out)


def pages_of_site() -> set[str]:
    """The pages that the navigation names, as paths from the root."""
    tree = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8"))

    def named(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
        for entry in entries:
            for below in entry.values():
                yield from [below] if isinstance(below, str) else named(below)

    return set(named(tree["project"]["nav"]))


if __name__ == "__main__":
    try:
        app()
    except RollmeshError as error:
        sys.stderr.write(f"docs: {error}\n")
        sys.exit(error.exit_code)
