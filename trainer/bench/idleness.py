"""How long the trainer waits for batches, and what that is worth beside a synchronous run.

Two meshes are alike but for K: `asynchronous` (K = 2) and `synchronous` (K = 0: the engines draw a batch, then the trainer
trains on it, in turn). Engines draw by the clock (`paced_mesh`), so the trainer has its core to itself.

    quick    K = 0, engines in no hurry to be slow  ──► busy_s: what a step takes once its batch is there
    pace     token_s = stretch · busy_s / typical longest answer of a batch
    sync     K = 0 at that pace                     ──► trained tokens a second
    async    K = 2 at that pace                     ──► trained tokens a second, share of the time that was waited

The pace is set by the trainer's own, or the figures would be the machine's: the longest answer of a batch takes `stretch`
optimizer steps, K by default, as slow as answers may be whose first token is still to count when the last one is drawn.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.bench.paced_mesh import PacedPlan, PacedRun, make_policy, run_paced
from trainer.bench.trainer_report import Measured

K = 2
STRETCH = float(K)
STEPS, SYNC_STEPS = 30, 10
PLAN = PacedPlan(
    groups_per_step=8,
    group_size=8,
    servers=2,
    median=24.0,
    sigma=1.0,
    longest=512,
    hidden_size=256,
    layers=4,
    seed=1,
)
"""Answers of 40 tokens in the mean; one in forty is longer than 170, and the longest of a batch mostly than 200."""
_QUICK_TOKEN_S = 1e-4
_QUICK_STEPS, _QUICK_WARM_UP = 6, 3


@dataclass(frozen=True)
class Idleness:
    """`busy_s`: of a step, without waiting. `longest`: typical longest answer of a batch, tokens. `token_s`: the pace."""

    busy_s: float
    longest: float
    token_s: float
    asynchronous: PacedRun
    synchronous: PacedRun

    @property
    def idle_fraction(self) -> float:
        return self.asynchronous.idle

    @property
    def async_vs_sync(self) -> float:
        return self.asynchronous.tokens_per_s / self.synchronous.tokens_per_s


async def measure_rounds(rounds: int, seed: int, say: Callable[[str], None]) -> Measured:
    """`idle_fraction` and `async_vs_sync`, so many times, with what people may want to know of them.

    `say`: is told of each round. Raises RollmeshError when a process fails.
    """
    measured = []
    for number in range(1, rounds + 1):
        plan = replace(PLAN, seed=seed + number - 1)
        with tempfile.TemporaryDirectory(prefix="rollmesh-paced-") as folder:
            measured.append(
                await measure_idleness(plan, stretch=STRETCH, steps=STEPS, sync_steps=SYNC_STEPS, folder=Path(folder))
            )
        say(f"paced mesh, round {number} of {rounds}: {_describe(measured[-1])}")
    if not rounds:
        return Measured(missing=dict.fromkeys(("idle_fraction", "async_vs_sync"), "no paced rounds were asked for"))
    return Measured(
        rounds={
            "idle_fraction": [each.idle_fraction for each in measured],
            "async_vs_sync": [each.async_vs_sync for each in measured],
        },
        seen={f"paced mesh, round {number}": _describe(each) for number, each in enumerate(measured, start=1)},
    )


def _describe(measured: Idleness) -> str:
    of = [
        f"{name}: {run.tokens_per_s:.0f} tokens/s, {run.wall_s / len(run.lines):.2f} s a step, idle {run.idle:.1%}, "
        f"{run.masked_fraction:.1%} of the tokens over K, other processes on {run.others_cpu:.2f} cores"
        for name, run in ((f"K = {K}", measured.asynchronous), ("K = 0", measured.synchronous))
    ]
    pace = f"{measured.token_s * 1e3:.1f} ms a token, longest answer of a batch typically {measured.longest:.0f} tokens"
    return "; ".join([f"a step trains for {measured.busy_s:.2f} s; {pace}", *of])


async def measure_idleness(plan: PacedPlan, *, stretch: float, steps: int, sync_steps: int, folder: Path) -> Idleness:
    """Run the three meshes, one after the other. `folder`: for models, logs and runs; empty. Raises RollmeshError."""
    model = await make_policy(plan, folder)
    quick = await run_paced(
        plan,
        k=0,
        token_s=_QUICK_TOKEN_S,
        steps=_QUICK_STEPS,
        warm_up=_QUICK_WARM_UP,
        model=model,
        folder=folder / "quick",
    )
    busy_s = statistics.median(line.step_ms - line.wait_ms for line in quick.lines) / 1e3
    longest = typical_longest(plan.median, plan.sigma, plan.longest, plan.batch)
    token_s = stretch * busy_s / longest
    synchronous = await run_paced(
        plan, k=0, token_s=token_s, steps=sync_steps, warm_up=2, model=model, folder=folder / "sync"
    )
    # The first K + 1 batches are drawn by the first version, before there is anything to train on.
    asynchronous = await run_paced(
        plan, k=K, token_s=token_s, steps=steps, warm_up=2 * (K + 1), model=model, folder=folder / "async"
    )
    return Idleness(busy_s, longest, token_s, asynchronous, synchronous)


def typical_longest(median: float, sigma: float, cut: int, answers: int) -> float:
    """The median of the longest of so many log-normal lengths, those above `cut` drawn again."""
    normal = statistics.NormalDist()
    below = normal.cdf(math.log(cut / median) / sigma)
    return median * math.exp(sigma * normal.inv_cdf(below * 0.5 ** (1 / answers)))
