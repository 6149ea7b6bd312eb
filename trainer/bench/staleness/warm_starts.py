"""What the runs of a seed start from: demonstrations, problems and a warm-started policy, by the mesh's own commands.

rollmesh demonstrations ──► <folder>/task: problems.jsonl, held_out.jsonl, … ──rollmesh sft──► <folder>/model (or cached)
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.bench.processes import PYTHON, running
from services.wire.errors import RollmeshError

TASK = "running-sums"
HELD_OUT = 512
_DEADLINE_S = 300.0


def problems_in(folder: Path) -> Path:
    """The train problems in the order of a run."""
    return folder / "task" / "problems.jsonl"


def held_out_in(folder: Path) -> Path:
    return folder / "task" / "held_out.jsonl"


def model_in(folder: Path) -> Path:
    return folder / "model"


async def warm_start(folder: Path, seed: int, problems: int) -> None:
    """Fill `folder` for the runs of `seed`. Raises RollmeshError, with the end of the log, when a command fails."""
    task = folder / "task"
    asked = ["--problems", str(problems), "--held-out", str(HELD_OUT)]
    await _finish("demonstrations", ["--task", TASK, "--seed", str(seed), "--out", str(task), *asked], folder)
    model = ["--demonstrations", str(task), "--seed", str(seed), "--out", str(model_in(folder)), "--threads", "1"]
    await _finish("sft", model, folder)


async def _finish(name: str, arguments: list[str], folder: Path) -> None:
    async with running(name, [*PYTHON, "services", name, *arguments], folder) as child:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                code = await child.process.wait()
        except TimeoutError as error:
            raise RollmeshError(f"rollmesh {name} took longer than {_DEADLINE_S:.0f} s", child.tail()) from error
        if code:
            child.check()
