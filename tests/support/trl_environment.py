"""Where TRL is: in this environment, or in the one of its own that `./dev` makes for benchmarks."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

TRL_PYTHON = Path(sys.executable) if find_spec("trl") else Path(__file__).parents[2] / ".venv-trl/bin/python"
NO_TRL = "TRL is in no environment here; `./dev test --all` makes one"
