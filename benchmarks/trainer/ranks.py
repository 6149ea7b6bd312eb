"""Two data ranks on two cores against one: trained tokens a second, and what packing and advantages take of a step.

    small     a random policy, a batch of heavy-tailed lengths
    smollm2   SmolLM2-135M under its recipe, a batch as that recipe makes them
    arm     1 or 2 processes, one thread of torch each ─► steps on one batch ─► seconds of each
    round   one rank ─► two ranks, or the other way round

Ranks are started by torchrun's variables, and do what the trainer's do: rank 0 packs and gives orders (`trainer.parallel`).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.harness.ranked import run_ranks
from benchmarks.trainer.report import Measured
from services.host.models import packaged_folder
from services.host.run_folder import is_complete
from services.policies.training.layout import Layout

HIDDEN_SIZE, LAYERS, STEPS = 256, 4, 5
SMOLLM2, SMOLLM2_STEPS = "smollm2-135m", 3
_WITHIN_S = 600.0


class Arm(msgspec.Struct, frozen=True):
    """Of one arm of one round. `step_s`: in the median; `pack_share`: of a step, for packing and advantages."""

    step_s: float
    pack_share: float


async def measure_ranks(
    rounds: int, say: Callable[[str], None], hidden_size: int = HIDDEN_SIZE, layers: int = LAYERS, steps: int = STEPS
) -> Measured:
    """`scaling_2`: trained tokens a second of two ranks ÷ one's; `pack_share`: of the steps of one rank. Raises
    RollmeshError when a rank fails."""
    scaling, share, seen = [], [], {}
    with tempfile.TemporaryDirectory(prefix="rollmesh-ranks-") as scratch:
        for number in range(1, rounds + 1):
            arms: dict[int, Arm] = {}
            for ranks in (1, 2) if number % 2 else (2, 1):
                folder = Path(scratch) / f"{number}-{ranks}"
                folder.mkdir()
                arms[ranks] = await _arm(ranks, folder, hidden_size, layers, steps)
            scaling.append(arms[1].step_s / arms[2].step_s)
            share.append(arms[1].pack_share)
            told = f"a step {arms[1].step_s:.2f} s on one rank, {arms[2].step_s:.2f} s on two"
            seen[f"ranks, round {number}"] = told
            say(f"ranks, round {number}: {told}")
    return Measured(rounds={"scaling_2": scaling, "pack_share": share}, seen=seen)


async def measure_smollm2_ranks(rounds: int, say: Callable[[str], None], steps: int = SMOLLM2_STEPS) -> Measured:
    """`scaling_smollm2`: optimizer steps of two ranks ÷ those of one, in the same time; 7 GB. Nothing without the model.

    Raises RollmeshError when a rank fails.
    """
    model = packaged_folder(SMOLLM2)
    if not is_complete(model):
        return Measured(missing={"scaling_smollm2": f"no model: rollmesh models fetch {SMOLLM2}"})
    scaling, seen = [], {}
    with tempfile.TemporaryDirectory(prefix="rollmesh-ranks-") as scratch:
        for number in range(1, rounds + 1):
            arms: dict[int, Arm] = {}
            for ranks in (1, 2) if number % 2 else (2, 1):
                folder = Path(scratch) / f"{number}-{ranks}"
                folder.mkdir()
                arms[ranks] = await _arm(ranks, folder, 0, 0, steps, model)
            scaling.append(arms[1].step_s / arms[2].step_s)
            told = f"a step {arms[1].step_s:.1f} s on one rank, {arms[2].step_s:.1f} s on two"
            seen[f"ranks, SmolLM2, round {number}"] = told
            say(f"ranks, SmolLM2, round {number}: {told}")
    return Measured(rounds={"scaling_smollm2": scaling}, seen=seen)


async def _arm(ranks: int, folder: Path, hidden_size: int, layers: int, steps: int, model: Path | None = None) -> Arm:
    """`model`: None for a random policy of that size."""
    found = folder / "arm.json"
    words = (str(found), *map(str, (ranks, hidden_size, layers, steps)), *([] if model is None else [str(model)]))
    await run_ranks(ranks, "benchmarks.trainer.ranks", words, folder, _WITHIN_S)
    return msgspec.json.decode(found.read_bytes(), type=Arm)


def _run(found: Path, ranks: int, hidden_size: int, layers: int, steps: int, model: Path | None) -> None:
    """One rank's part; rank 0 writes `found`. The first step is not counted."""
    import torch

    from benchmarks.trainer.step_speed import HeavyTail, as_groups
    from services.config.load import load_settings
    from services.config.recipes import find_recipe
    from trainer.checkpoint.model_folder import load_policy
    from trainer.model.roles import make_roles
    from trainer.model.train_batch import follow, train_batch
    from trainer.parallel.orders import Stop, Train, decode, tell
    from trainer.parallel.ranks import joined
    from trainer.sft.tiny_model import build_model

    torch.set_num_threads(1)
    tail, recipe = HeavyTail(), None
    if model is not None:
        # As the run's first batches: 45 tokens of a prompt, and more than a third of the answers ends at the limit.
        tail, recipe = (
            HeavyTail(median=20.0, sigma=0.5, longest=24, vocabulary=49_152, prompt=45),
            find_recipe("smollm2"),
        )
    settings = load_settings(recipe, [f"steps={steps + 1}", f"k={steps + 1}"])
    with joined(Layout(data=ranks)) as own:
        roles = make_roles(
            lambda: (
                build_model(1, hidden_size=hidden_size, layers=layers, vocabulary=tail.vocabulary + 4)
                if model is None
                else load_policy(model)
            ),
            settings,
            0,
            ranks=own,
        )
        if not own.leads:
            while isinstance(order := decode(own.receive()), Train):
                follow(roles, order)
            return
        groups = as_groups(tail.answers(seed=1), tail.group_size)
        whole, packing = [], []
        for _ in range(steps + 1):
            began = time.perf_counter()
            (made,) = train_batch(roles, settings, groups, 1)
            whole.append(time.perf_counter() - began)
            packing.append(made.pack_s)
        tell(own, Stop())
        arm = Arm(statistics.median(whole[1:]), sum(packing[1:]) / sum(whole[1:]))
        found.write_bytes(msgspec.json.encode(arm))


if __name__ == "__main__":
    # The machine's cores are shared out by arms, not by torch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asked, folder = [int(word) for word in sys.argv[2:6]], sys.argv[6:]
    _run(Path(sys.argv[1]), asked[0], asked[1], asked[2], asked[3], Path(folder[0]) if folder else None)
