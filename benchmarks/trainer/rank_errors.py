"""Ranks against one process: how far their losses, gradients and weights are from its, under each option of memory.

    parallel_max_error     float32: the largest difference of a step's loss, of a first gradient, of a weight after 20 steps
                           of SGD, of each tensor's maximum
    parallel_half_error    passes in bfloat16: the distance of ranks' first gradient from one process's in float32 ÷ that of
                           one process in bfloat16; the largest

    1 rank      each option, kept as what is wanted ─► files          checkpointing changes nothing: its wanted is `plain`
    2, 4 ranks  each layout, each option ─► against the files         experts on data and on tensor ranks among them

What ranks do not know together is refused, by name, before a model is loaded: that is looked at too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness.ranked import run_ranks
from benchmarks.trainer.rank_steps import Arrays, Steps, largest_error, make_steps, mean_distance
from benchmarks.trainer.report import Measured
from benchmarks.trainer.step_speed import HeavyTail, as_groups
from services.config.checks import check_ranks
from services.config.load import load_settings
from services.policies.batching import Group
from services.policies.training.layout import Layout
from services.wire.errors import RollmeshError, UsageError
from services.wire.trajectory import Trajectory
from trainer.parallel.ranks import Ranks, joined

STEPS = 20
_WITHIN_S = 1800.0
_TAIL = HeavyTail(groups=2, group_size=4, median=5.0, sigma=0.6, longest=16, prompt=5)
_DENSE, _EXPERTS = "dense", "experts"
LAYOUTS: Mapping[int, Sequence[Layout]] = {
    1: (Layout(),),
    2: (
        Layout(data=2),
        Layout(context=2),
        Layout(tensor=2),
        Layout(data=2, expert=2),
        Layout(tensor=2, expert=2),
    ),
    4: (
        Layout(data=4),
        Layout(replicate=2, data=2),
        Layout(data=2, context=2),
        Layout(data=2, tensor=2),
        Layout(data=4, expert=2),
        Layout(data=4, expert=4),
        Layout(replicate=2, data=2, expert=2),
        Layout(data=2, context=2, expert=2),
        Layout(data=2, tensor=2, expert=2),
    ),
}
"""By the number of ranks. Those that split experts train a mixture of experts, the others both models."""
_FULL, _SELECTIVE = (f"trainer.activation_checkpointing={which}" for which in ("full", "selective"))
PLAIN = "plain"
OPTIONS: Mapping[str, Sequence[str]] = {
    PLAIN: (),
    "full": (_FULL,),
    "selective": (_SELECTIVE,),
    "adapters, full": ("trainer.lora.rank=4", "trainer.loss.kl=0.1", _FULL),
    "critic, reference, full": ("trainer.advantage.estimator=gae", "trainer.loss.kl=0.1", _FULL),
    "bfloat16": ("trainer.dtype=bfloat16",),
    "bfloat16, full": ("trainer.dtype=bfloat16", _FULL),
}
_AS_PLAIN = ("full", "selective")
"""Options that change no number."""
REFUSED = (
    "trainer.optimizer.kind=muon",
    "trainer.optimizer.state_bits=8",
    "trainer.optimizer.offload=true",
    "trainer.offload_idle=true",
    "trainer.compile=true",
)
"""Options of one process alone."""


class Error(msgspec.Struct, frozen=True):
    """Of one case. `half`: as `parallel_half_error`; None where passes are in float32, `most` where they are not."""

    case: str
    most: float | None = None
    half: float | None = None


async def measure_rank_errors(
    say: Callable[[str], None],
    layouts: Mapping[int, Sequence[Layout]] = LAYOUTS,
    options: Sequence[str] = tuple(OPTIONS),
    steps: int = STEPS,
) -> Measured:
    """Both figures, of all cases. Raises RollmeshError where a rank fails, and for an option of one process alone that
    several ranks do not refuse by name."""
    found: list[Error] = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-errors-") as scratch:
        folder = Path(scratch)
        for number, some in sorted({1: [Layout()], **layouts}.items()):
            asked = _Asked(list(some), list(options), steps)
            words = (str(folder), msgspec.json.encode(asked).decode())
            await run_ranks(number, "benchmarks.trainer.rank_errors", words, folder, _WITHIN_S)
            errors = msgspec.json.decode((folder / f"{number}.json").read_bytes(), type=list[Error])
            for each in errors:
                say(f"{each.case}: {_words(each)}")
            found += errors
    seen = {"refused with several ranks": ", ".join(_refused())}
    rounds = {}
    for name, of in (("parallel_max_error", "most"), ("parallel_half_error", "half")):
        cases = [(value, each.case) for each in found if (value := getattr(each, of)) is not None]
        if cases:
            most, case = max(cases)
            rounds[name], seen[f"{name}, by"] = [most], f"{case}, of {len(cases)} cases"
    return Measured(rounds=rounds, seen=seen)


class _Asked(msgspec.Struct, frozen=True):
    """Of one number of ranks."""

    layouts: list[Layout]
    options: list[str]
    steps: int


def _words(error: Error) -> str:
    return f"{error.most:.1e}" if error.most is not None else f"{error.half:.2f} of one process's error"


def _refused() -> Sequence[str]:
    """REFUSED, each of which several ranks refuse by its name. Raises RollmeshError for another."""
    for setting in REFUSED:
        try:
            check_ranks(load_settings(None, [setting]), Layout(data=2))
        except UsageError as error:
            if setting not in error.what:
                raise RollmeshError(f"{setting} is refused by another name: {error.what}") from error
        else:
            raise RollmeshError(f"{setting} is not refused with several ranks", "measure it, or refuse it")
    return REFUSED


def _steps_of(ranks: Ranks, model: str, option: str, steps: int) -> Steps | None:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedModel

    from benchmarks.trainer.plan_cases import Case, sized
    from benchmarks.trainer.planned import config_of

    others = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if model == _EXPERTS else {}
    kind = "qwen3_moe" if others else "qwen3"
    config = config_of(Case(model, sized(32, 2, (4, 2, 8), 48, 64, tied=not others, kind=kind, **others)))

    def load() -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                # Large enough for tokens to matter to each other.
                for weight in made.parameters():
                    weight.mul_(4.0 if weight.ndim > 1 else 1.0)
        return made

    def batch(step: int) -> Sequence[Group[Trajectory]]:
        return as_groups(_TAIL.answers(seed=step), _TAIL.group_size)

    half = "bfloat16" in option
    # Passes of few tokens: several on each rank, and not equally many.
    settings = load_settings(
        None,
        [
            f"steps={steps}",
            f"k={steps}",
            "trainer.learning_rate=0.05",
            "trainer.warmup_steps=0",
            "trainer.clip_grad_norm=0.5",
            "trainer.micro_batch_tokens=60",
            *OPTIONS[option],
        ],
    )
    return make_steps(ranks, load, settings, batch, 1 if half else steps)


def _as_arrays(steps: Steps) -> Arrays:
    losses = np.array([[said.loss, valued.value_loss or 0.0] for said, valued in steps.told])
    return {
        "losses": losses,
        **{f"gradient {name}": each for name, each in steps.gradients.items()},
        **{f"weight {name}": each for name, each in steps.weights.items()},
    }


def _wanted(folder: Path, model: str, option: str) -> dict[str, Any]:
    with np.load(folder / f"{model}, {option}.npz") as kept:
        return dict(kept)


def _gradients(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in arrays.items() if name.startswith("gradient")}


def _error(folder: Path, case: str, model: str, option: str, arrays: Arrays) -> Error:
    if "bfloat16" not in option:
        return Error(case, most=largest_error(arrays, _wanted(folder, model, PLAIN if option in _AS_PLAIN else option)))
    exact, one = _gradients(_wanted(folder, model, PLAIN)), _gradients(_wanted(folder, model, option))
    return Error(case, half=mean_distance(_gradients(arrays), exact) / mean_distance(one, exact))


def _run(folder: Path, asked: _Asked) -> None:
    """One rank's part; rank 0 keeps what it finds in `folder`."""
    import torch

    torch.set_num_threads(1)
    ranks, found = asked.layouts[0].ranks, list[Error]()
    with joined(asked.layouts[0]) as group:
        for layout in asked.layouts:
            own = Ranks.of_group(layout) if ranks > 1 else group
            for model in (_DENSE, _EXPERTS) if layout.expert == 1 else (_EXPERTS,):
                for option in asked.options:
                    steps = _steps_of(own, model, option, asked.steps)
                    if steps is None:
                        continue
                    arrays = _as_arrays(steps)
                    if ranks == 1:
                        np.savez(folder / f"{model}, {option}.npz", allow_pickle=False, **arrays)
                        if option not in _AS_PLAIN:
                            continue
                    found.append(_error(folder, f"{layout}, {model}, {option}", model, option, arrays))
        if group.leads:
            (folder / f"{ranks}.json").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _run(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=_Asked))
