"""What evaluations beside training cost: the paced mesh with one of 256 problems every 20 versions, and without.

Engines generate by the clock, as fast as training needs and a little faster, so that what an evaluation takes away from
training is not hidden by processes that compete for two cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.trainer.idleness import (
    PLAN,
    STRETCH,
    K,
    PacedRun,
    busy_seconds,
    make_policy,
    run_paced,
    typical_longest,
)
from benchmarks.trainer.report import Measured

EVERY, PROBLEMS = 20, 256
STEPS = 3 * EVERY
_WITHOUT = ("--evaluation-problems", "1")
_WITH = ("--evaluation-problems", str(PROBLEMS), "--evaluate-every", str(EVERY))


async def measure_evaluating(rounds: int, say: Callable[[str], None]) -> Measured:
    """`eval_cost`: the share of trained tokens a second that is lost. Raises RollmeshError when a process fails."""
    if not rounds:
        return Measured(missing={"eval_cost": "no paced rounds were asked for"})
    costs, seen = [], {}
    with tempfile.TemporaryDirectory(prefix="rollmesh-paced-") as scratch:
        folder = Path(scratch)
        model = await make_policy(PLAN, folder)
        busy_s = await busy_seconds(PLAN, model, folder / "quick")
        token_s = STRETCH * busy_s / typical_longest(PLAN.median, PLAN.sigma, PLAN.longest, PLAN.batch)

        async def run(name: str, flags: tuple[str, ...]) -> PacedRun:
            return await run_paced(
                PLAN,
                k=K,
                token_s=token_s,
                steps=STEPS,
                warm_up=2 * (K + 1),
                model=model,
                folder=folder / name,
                evaluation=flags,
            )

        for number in range(1, rounds + 1):
            # The order changes, so that what only comes with time is on neither side.
            arms = {"without": _WITHOUT, "with": _WITH}
            order = list(arms) if number % 2 else list(reversed(arms))
            made = {name: await run(f"{name}-{number}", arms[name]) for name in order}
            costs.append(1.0 - made["with"].tokens_per_s / made["without"].tokens_per_s)
            told = f"evaluating every {EVERY} versions, round {number}"
            seen[told] = "; ".join(
                f"{name}: {each.tokens_per_s:.0f} tokens/s, idle {each.idle:.1%}" for name, each in made.items()
            )
            say(f"{told}: {seen[told]}")
    return Measured(rounds={"eval_cost": costs}, seen=seen)
