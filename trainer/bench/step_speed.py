"""Trained tokens a second of one optimizer step on one batch of heavy-tailed lengths: ours, a padded loop's, TRL's.

    round:  packed step ─► padded step ─► (cut) ─► TRL's step        one after the other, so that a drift touches all alike

All arms start from one model and learn from the same tokens with the same loss and optimizer. Ours counts from groups to
weights, packing included; TRL's arm (`trl_step_arm`) is its own trainer with its generation left out, in its own process.
The padded loop that the figure is taken against pads to the longest row of the batch, as TRL does; one that cuts each pass
to the longest of its own rows runs beside it.
"""

from __future__ import annotations

import asyncio
import copy
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from services.bench.piped import Piped, running_piped
from services.settings import TrainerSettings
from services.wire.errors import RollmeshError
from trainer.bench.heavy_tail import PROMPT_TOKENS, Answer, HeavyTail, as_groups
from trainer.bench.padded_loop import PaddedLoop
from trainer.bench.trainer_report import Measured
from trainer.learner import Learner
from trainer.packing import pack
from trainer.rows import rows_of
from trainer.tiny_policy import build_model, save_policy

_ARM = Path(__file__).with_name("trl_step_arm.py")
_START_WITHIN_S = 300.0
_STEP_WITHIN_S = 600.0
PACKED, PADDED, CUT, TRL = "packed", "padded", "padded, each pass cut to its longest", "TRL"
_HIDDEN_SIZE, _LAYERS = 128, 4

Step = Callable[[], Awaitable[float]]
"""One optimizer step; the seconds that it took."""


class _Go(msgspec.Struct, frozen=True):
    """Asks TRL's process for a step."""


class _Took(msgspec.Struct, frozen=True):
    seconds: float
    trl: str
    """TRL's version."""


@dataclass(frozen=True)
class SpeedPlan:
    """`rows`: a pass of the padded arms and of TRL's. `threads`: of torch, in each arm."""

    rounds: int
    threads: int
    seed: int
    tail: HeavyTail = field(default_factory=HeavyTail)
    rows: int = 8


async def measure_speed(plan: SpeedPlan, trl_python: Path | None, folder: Path, say: Callable[[str], None]) -> Measured:
    """All arms, interleaved, after a step of each that is not counted. `folder`: for models and logs; empty.

    `trl_python`: of the environment that holds TRL, None where there is none.
    """
    answers = plan.tail.answers(plan.seed)
    model = build_model(plan.seed, hidden_size=_HIDDEN_SIZE, layers=_LAYERS)
    tokens = sum(len(answer.completion) for answer in answers)
    arms, trl = _own_arms(plan, model, answers), None
    async with AsyncExitStack() as stack:
        why = "" if trl_python is not None else "no Python with TRL: `./dev bench trainer` makes it"
        if trl_python is not None:
            try:
                trl = await _trl_arm(plan, model, answers, trl_python, folder, stack)
                arms[TRL] = trl.step
            except RollmeshError as error:
                why = str(error)
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(plan.rounds + 1):
            for name, step in arms.items():
                speed = tokens / await step()
                if number:
                    speeds[name].append(speed)
            if number:
                say(f"round {number}: " + ", ".join(f"{name} {found[-1]:.0f}" for name, found in speeds.items()))
    return _judge(plan, answers, speeds, why, None if trl is None else trl.version)


def _own_arms(plan: SpeedPlan, model: PreTrainedModel, answers: list[Answer]) -> dict[str, Step]:
    settings = TrainerSettings(warmup_steps=0)
    learner = Learner(copy.deepcopy(model), settings)
    groups = as_groups(answers, plan.tail.group_size)

    def packed() -> None:
        rows, tally = rows_of(groups, learner.version, learner.version)
        learner.step(pack(rows, tally, settings.micro_batch_tokens))

    padded, cut = (PaddedLoop(copy.deepcopy(model), settings, plan.rows, cut=cut) for cut in (False, True))
    arms = {PACKED: packed, PADDED: lambda: padded.step(answers), CUT: lambda: cut.step(answers)}
    return {name: _timed(arm, plan.threads) for name, arm in arms.items()}


def _timed(arm: Callable[[], None], threads: int) -> Step:
    def run() -> float:
        # Of this thread alone, where torch keeps the number.
        torch.set_num_threads(threads)
        started = time.perf_counter()
        arm()
        return time.perf_counter() - started

    return lambda: asyncio.to_thread(run)


async def _trl_arm(
    plan: SpeedPlan,
    model: Qwen3ForCausalLM,
    answers: list[Answer],
    python: Path,
    folder: Path,
    stack: AsyncExitStack,
) -> _TrlArm:
    save_policy(model, folder / "model")
    (folder / "answers.json").write_bytes(msgspec.json.encode(answers))
    flags = {
        "--model": folder / "model",
        "--answers": folder / "answers.json",
        "--scratch": folder / "trl",
        "--rows": plan.rows,
        "--group-size": plan.tail.group_size,
        "--threads": plan.threads,
        "--learning-rate": TrainerSettings().learning_rate,
    }
    command = [str(python), "-P", str(_ARM), *(str(part) for flag in flags.items() for part in flag)]
    surroundings = {"OMP_NUM_THREADS": str(plan.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    arm: Piped = await stack.enter_async_context(
        running_piped("trl", command, folder, start_within_s=_START_WITHIN_S, environment=surroundings)
    )

    return _TrlArm(arm)


@dataclass
class _TrlArm:
    piped: Piped
    version: str = "unknown"

    async def step(self) -> float:
        took = await self.piped.ask(_Go(), _Took, _STEP_WITHIN_S)
        self.version = took.trl
        return took.seconds


def _judge(
    plan: SpeedPlan, answers: list[Answer], speeds: Mapping[str, list[float]], why_no_trl: str, trl: str | None
) -> Measured:
    lengths = sorted(len(answer.completion) for answer in answers)
    rounds = {"packed_vs_padded": _ratios(speeds[PACKED], speeds[PADDED])}
    if TRL in speeds:
        rounds["vs_trl"] = _ratios(speeds[PACKED], speeds[TRL])
    cut = statistics.median(_ratios(speeds[PACKED], speeds[CUT]))
    seen = {f"tokens/s, {name}": _words(found) for name, found in speeds.items()}
    seen["packed ÷ padded, each pass cut"] = f"{cut:.2f}"
    seen["batch"] = (
        f"{len(lengths)} answers after {PROMPT_TOKENS} tokens of prompt: median {statistics.median(lengths):.0f} tokens, "
        f"mean {statistics.fmean(lengths):.0f}, longest {lengths[-1]}; {plan.rows} rows a padded pass"
    )
    seen["model"] = f"Qwen3 type, {_LAYERS} layers of {_HIDDEN_SIZE}, {plan.threads} thread(s)"
    if trl is not None:
        seen["TRL"] = trl
    return Measured(rounds=rounds, missing={"vs_trl": why_no_trl} if why_no_trl else {}, seen=seen)


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def _words(found: list[float]) -> str:
    return f"{statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f})"
