"""Prints which share of each package's lines ran, from the data that `./dev coverage` collected."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[2]


def main() -> None:
    measured = Coverage()
    measured.load()
    lines: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for file in measured.get_data().measured_files():
        package = Path(file).relative_to(ROOT).parts[0]
        _, statements, _, missing, _ = measured.analysis2(file)
        for name in (package, "all"):
            lines[name] += len(statements)
            missed[name] += len(missing)
    sys.stdout.write(f"{'package':16}{'lines':>8}{'covered':>9}{'%':>8}\n")
    for name in [*sorted(lines.keys() - {"all"}), "all"]:
        covered = lines[name] - missed[name]
        sys.stdout.write(f"{name:16}{lines[name]:8}{covered:9}{100 * covered / lines[name]:8.2f}\n")


if __name__ == "__main__":
    main()
