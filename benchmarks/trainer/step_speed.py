"""Trained tokens a second of one optimizer step on one batch of heavy-tailed lengths: ours, a padded loop's, TRL's.

    round:  packed step ─► padded step ─► (cut) ─► TRL's step        one after the other, so that a drift touches all alike

All arms start from one model and learn from the same tokens with the same loss and optimizer. Ours counts from groups
to weights, packing included; TRL's arm (`trl_arms.py step`) is its own trainer with its generation left out, in its own
process. The padded loop that the figure is taken against pads to the longest row of the batch, as TRL does; one that
cuts each pass to the longest of its own rows runs beside it.
"""

from __future__ import annotations

import asyncio
import copy
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Qwen3ForCausalLM

from benchmarks.harness.processes import Piped, running_piped
from benchmarks.trainer.report import Measured
from services.config.settings import TrainerSettings
from services.policies.batching import Group, Member
from services.wire.errors import RollmeshError
from services.wire.packed import pack_logprobs, pack_mask, pack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Segment, Trajectory, VersionSpan
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model.learner import Learner
from trainer.sft.tiny_model import build_model, save_policy

PROMPT_TOKENS = 32
_FIRST_TOKEN = 2
"""Behind padding and the end."""


class Answer(msgspec.Struct, frozen=True):
    """A prompt and what was sampled after it; `advantage`: of all its tokens."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    advantage: float


@dataclass(frozen=True)
class HeavyTail:
    """A batch of answers with log-normal lengths, truncated: `median`, `sigma`, `longest` in tokens.

    Padded to the longest, most of it is padding. Tokens and logprobs are random, and half of each group is right.
    `vocabulary`: how many tokens there are; `prompt`: tokens of one, which a group shares.
    """

    groups: int = 8
    group_size: int = 8
    median: float = 128.0
    sigma: float = 0.8
    longest: int = 1024
    vocabulary: int = 60
    prompt: int = PROMPT_TOKENS

    def answers(self, seed: int) -> list[Answer]:
        """Group by group; the same seed gives the same ones."""
        numbers = np.random.default_rng(seed)
        answers = []
        for _ in range(self.groups):
            prompt = self._tokens(numbers, self.prompt)
            for member in range(self.group_size):
                length = int(np.clip(numbers.lognormal(math.log(self.median), self.sigma), 1, self.longest))
                # Near those of a policy that knows nothing, which a fresh one is.
                logprobs = -math.log(self.vocabulary) + 0.1 * numbers.standard_normal(length)
                advantage = 1.0 if member % 2 else -1.0
                answers.append(Answer(prompt, self._tokens(numbers, length), logprobs.tolist(), advantage))
        return answers

    def _tokens(self, numbers: np.random.Generator, count: int) -> list[int]:
        sampled: list[int] = numbers.integers(_FIRST_TOKEN, self.vocabulary, count).tolist()
        return sampled


def as_groups(answers: Sequence[Answer], group_size: int) -> list[Group[Trajectory]]:
    """What the trainer's intake would hand out, sampled by version 0."""
    return [
        Group(
            f"g{ordinal}",
            ordinal,
            [
                _member(answer, ordinal, index, group_size)
                for index, answer in enumerate(answers[start : start + group_size])
            ],
        )
        for ordinal, start in enumerate(range(0, len(answers), group_size))
    ]


def _member(answer: Answer, ordinal: int, index: int, size: int) -> Member[Trajectory]:
    group, asked, sampled = f"g{ordinal}", len(answer.prompt), len(answer.completion)
    segment = Segment(
        token_ids=pack_tokens([*answer.prompt, *answer.completion]),
        loss_mask=pack_mask([0] * asked + [1] * sampled),
        logprobs=pack_logprobs([0.0] * asked + answer.logprobs),
        version_spans=[VersionSpan(asked, sampled, 0)],
    )
    trajectory = Trajectory(
        run_id="bench",
        trajectory_id=f"{group}/{index}",
        group_id=group,
        group_ordinal=ordinal,
        group_size=size,
        member=index,
        task="bench",
        segments=[segment],
        reward=float(answer.advantage > 0),
        reward_components={},
        samplings=[SamplingParams(max_tokens=sampled)],
        server_id="bench",
        opened_at=0.0,
        finished_at=0.0,
    )
    return Member(f"{ordinal}-{index}", group, ordinal, size, index, trajectory)


_ARM = Path(__file__).with_name("trl_arms.py")
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
    """`rows`: a pass of the padded arms and of TRL's. `threads`: of torch, in each arm. `suffix`: of the figures' names."""

    rounds: int
    threads: int
    seed: int
    tail: HeavyTail = field(default_factory=HeavyTail)
    rows: int = 8
    suffix: str = ""


async def measure_speed(plan: SpeedPlan, trl_python: Path | None, folder: Path, say: Callable[[str], None]) -> Measured:
    """All arms, interleaved, after a step of each that is not counted. `folder`: for models and logs; empty.

    `trl_python`: of the environment that holds TRL, None where there is none.
    """
    answers = plan.tail.answers(plan.seed)
    model = build_model(plan.seed, hidden_size=_HIDDEN_SIZE, layers=_LAYERS, vocabulary=plan.tail.vocabulary + 4)
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
        learner.step(pack(rows, tally, settings.micro_batch_tokens, stem_width=learner.stem_width))

    padded, cut = (PaddedLoop(copy.deepcopy(model), settings, plan.rows, cut=cut) for cut in (False, True))
    arms = {PACKED: packed, PADDED: lambda: padded.step(answers), CUT: lambda: cut.step(answers)}
    return {name: timed(arm, plan.threads) for name, arm in arms.items()}


def timed(arm: Callable[[], None], threads: int) -> Step:
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
    command = [str(python), "-P", str(_ARM), "step", *(str(part) for flag in flags.items() for part in flag)]
    environ = {"OMP_NUM_THREADS": str(plan.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    arm: Piped = await stack.enter_async_context(
        running_piped("trl", command, folder, start_within_s=_START_WITHIN_S, environment=environ)
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
    rounds = {f"packed_vs_padded{plan.suffix}": _ratios(speeds[PACKED], speeds[PADDED])}
    if TRL in speeds:
        rounds[f"vs_trl{plan.suffix}"] = _ratios(speeds[PACKED], speeds[TRL])
    cut = statistics.median(_ratios(speeds[PACKED], speeds[CUT]))
    seen = {f"tokens/s{plan.suffix}, {name}": _words(found) for name, found in speeds.items()}
    seen[f"packed ÷ padded, each pass cut{plan.suffix}"] = f"{cut:.2f}"
    seen[f"batch{plan.suffix}"] = (
        f"{len(lengths)} answers after {plan.tail.prompt} tokens of prompt: median {statistics.median(lengths):.0f}, "
        f"mean {statistics.fmean(lengths):.0f}, longest {lengths[-1]}; {plan.rows} rows in a padded pass"
    )
    seen[f"model{plan.suffix}"] = (
        f"Qwen3 type, {_LAYERS} layers of {_HIDDEN_SIZE}, {plan.tail.vocabulary} tokens, {plan.threads} thread(s)"
    )
    if trl is not None:
        seen["TRL"] = trl
    return Measured(rounds=rounds, missing={f"vs_trl{plan.suffix}": why_no_trl} if why_no_trl else {}, seen=seen)


def with_long_prompts(measured: Measured) -> Measured:
    """The figures of prompts of 256 tokens: of the time beside TRL's."""
    shared = measured.rounds.get("vs_trl_shared")
    return Measured(
        rounds={} if shared is None else {"vs_trl_shared": [1.0 / speed for speed in shared]},
        missing=measured.missing,
        seen=measured.seen,
    )


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def _words(found: list[float]) -> str:
    return f"{statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f})"


class PaddedLoop:
    """The baseline: a padded Hugging Face loop with the same loss, optimizer and model.

    answers ──padded to the longest of the batch──► chunks of rows ──► all logits ──► PPO clip, mean over tokens ──► AdamW

    `rows`: of a forward/backward pass. `cut`: whether a pass is cut to the longest of its own rows.
    """

    def __init__(self, model: PreTrainedModel, settings: TrainerSettings, rows: int, *, cut: bool) -> None:
        self.model = model.eval()
        self._settings, self._rows, self._cut = settings, rows, cut
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, answers: Sequence[Answer]) -> None:
        """One optimizer step."""
        ids = _padded([torch.tensor([*answer.prompt, *answer.completion]) for answer in answers])
        there = _padded([torch.ones(len(answer.prompt) + len(answer.completion)) for answer in answers])
        behaviour = _padded([torch.tensor([0.0] * len(answer.prompt) + answer.logprobs) for answer in answers])
        sampled = there.clone()
        for row, answer in zip(sampled, answers, strict=True):
            row[: len(answer.prompt)] = 0.0
        advantages = torch.tensor([answer.advantage for answer in answers])[:, None]
        tokens = sampled.sum()
        for start in range(0, len(answers), self._rows):
            chunk = slice(start, start + self._rows)
            width = int(there[chunk].sum(1).max()) if self._cut else ids.shape[1]
            columns = (ids[chunk, :width], there[chunk, :width], behaviour[chunk, 1:width], sampled[chunk, 1:width])
            (self._loss(*columns, advantages[chunk]) / tokens).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self, ids: Tensor, there: Tensor, behaviour: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, attention_mask=there.long(), use_cache=False).logits[:, :-1].float()
        logprobs = logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
        ratio = ((logprobs - behaviour) * sampled).exp()
        loss = self._settings.loss
        bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        return -(torch.minimum(ratio * advantages, bounded * advantages) * sampled).sum()


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)
