"""Supervised fine-tuning of a Hugging Face folder on examples, by the learner that RL trains with.

    examples ─ template, tokenizer ─► rows, masked ─► held out: their loss before, every n steps and after
                                                  └─► the others, examples_per_step at a time, packed ─► optimizer step

ℓ = −Σ log π(t) / N over the N learned tokens of a step: RL's plain policy gradient with an advantage of 1 everywhere. The
same folder, data, settings and number of threads give the same weights on a CPU, and with `trainer.deterministic`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from services.config.checks import check_schedule
from services.config.fitting import annotated
from services.config.load import dump_settings
from services.config.settings import TrainerSettings
from services.config.training.algorithm import LossSettings
from services.host.files import appearing, writing
from services.wire.errors import NoModelError, UsageError
from trainer.checkpoint.environment import repeat_exactly
from trainer.checkpoint.model_folder import fill_model, load_policy
from trainer.model.adapters import Adapters
from trainer.model.learner import Learner
from trainer.model.precision import use_tf32
from trainer.sft.columns import Examples
from trainer.sft.display import Display
from trainer.sft.encoding import EncodedRow, ExampleEncoder
from trainer.sft.report import SETTINGS, ExampleCounts, StepLine, Summary, step_lines, write_summary
from trainer.sft.selection import Order, held_out, place_of, steps_of
from trainer.sft.sft_settings import SftSettings
from trainer.sft.steps import Chosen, SupervisedTraining

_LINES_OF_A_RUN = 20
"""Log lines of steps, where no bar is drawn."""


@dataclass(frozen=True)
class SftArguments:
    """`model`: a Hugging Face folder; `examples`: of `data`; `out`: not there yet; `origins`: of each setting."""

    model: Path
    data: Path
    examples: Examples
    out: Path
    settings: SftSettings
    origins: dict[str, str]


@dataclass
class Reached:
    """How far a training came, for whoever stops it. `steps`: 0 until they are known."""

    step: int = 0
    steps: int = 0


def finetune(arguments: SftArguments, display: Display, reached: Reached) -> Summary:
    """Train, and write `arguments.out`, whole or not at all.

    Raises UsageError for data, settings and folders that do not go together, AnomalyError for a loss that is not finite.
    """
    settings = arguments.settings
    torch.set_num_threads(settings.trainer.thread_count)
    if settings.trainer.deterministic:
        repeat_exactly()
    chosen = _choose(arguments, display)
    order, steps = _plan(settings, len(chosen.trained))
    reached.steps = steps
    with ExitStack() as stack, writing(arguments.out):
        # Now: a place that cannot be written is known before hours of training.
        making = stack.enter_context(appearing(arguments.out))
        lines = stack.enter_context(step_lines(making))
        model = load_policy(arguments.model, trust_remote_code=settings.model.trust_remote_code)
        use_tf32(settings.trainer.tf32, model.device)
        lora = settings.trainer.lora
        adapters = Adapters(model, lora, settings.seed) if lora.rank else None
        learner = Learner(model, _of_learner(settings), run_steps=steps, adapters=adapters)
        training = SupervisedTraining(learner, settings, chosen, order, steps)
        display.say(
            "training",
            examples=len(chosen.trained),
            held_out=chosen.counts.held_out,
            steps=steps,
            parameters=training.parameters,
            rows_kept_apart=learner.separation,
        )
        training.measure(0)
        for step in range(1, steps + 1):
            line = training.step(step)
            reached.step = step
            lines.add(line)
            _show(display, line, steps, training)
        written = training.take_best() if settings.evaluation.keep_best else steps
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.model.dtype]
        fill_model(making, model, arguments.model, adapters, dtype)
        (making / SETTINGS).write_text(annotated(dump_settings(settings), arguments.origins), encoding="utf-8")
        summary = training.summary(
            model=arguments.model,
            data=arguments.data,
            kind=arguments.examples.kind,
            written=written,
            rate_from=arguments.origins["trainer.learning_rate"],
        )
        write_summary(making, summary)
    return summary


def _choose(arguments: SftArguments, display: Display) -> Chosen:
    """Encode and part the examples."""
    data, examples = arguments.settings.data, arguments.examples
    try:
        code = arguments.settings.model.trust_remote_code
        config = AutoConfig.from_pretrained(arguments.model, trust_remote_code=code).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=code)
    except (OSError, ValueError, KeyError) as error:
        raise NoModelError(arguments.model, error) from error
    context: int | None = getattr(config, "max_position_embeddings", None)
    if data.longest is not None and context is not None and data.longest > context:
        raise UsageError(f"data.longest={data.longest} is more than the model's context", f"it takes {context} tokens")
    longest = data.longest or context
    encoder = ExampleEncoder(tokenizer, arguments.model, int(config.vocab_size))
    rows = encoder.encode(examples)
    _warn_of_unknown(rows, encoder.unknown, display)
    fits = [longest is None or all(len(row.token_ids) <= longest for row in each) for each in rows]
    used = [place for place, each in enumerate(rows) if each and fits[place]]
    apart = held_out([place_of(examples.each[place]) for place in used], data.held_out)
    train = [rows[place] for place, out in zip(used, apart, strict=True) if not out]
    measured = [rows[place] for place, out in zip(used, apart, strict=True) if out][
        : arguments.settings.evaluation.examples
    ]
    counts = ExampleCounts(
        read=len(rows),
        trained=len(train),
        held_out=sum(apart),
        measured=len(measured),
        too_long=fits.count(False),
        nothing_to_learn=sum(not each for each in rows),
    )
    if counts.too_long:
        display.say("examples dropped: too long", count=counts.too_long, longest=longest)
    if counts.nothing_to_learn:
        display.say("examples dropped: without an answer", count=counts.nothing_to_learn)
    if not train:
        raise UsageError(
            f"{arguments.data} leaves no example to train on: {counts.read} read, {counts.too_long} too long, "
            f"{counts.nothing_to_learn} without an answer, {counts.held_out} held out",
            "give more examples, or set data.longest or data.held_out",
        )
    return Chosen(train, [row for each in measured for row in each], counts)


def _warn_of_unknown(rows: Sequence[Sequence[EncodedRow]], unknown: int | None, display: Display) -> None:
    if unknown is None:
        return
    count = sum(int((row.token_ids[row.learned] == unknown).any()) for each in rows for row in each)
    if count:
        display.say("answers hold text that the tokenizer has no token for", rows=count)


def _plan(settings: SftSettings, examples: int) -> tuple[Order, int]:
    size = settings.examples_per_step
    if settings.steps is None:
        steps, last = steps_of(examples, size, settings.epochs), examples * settings.epochs
    else:
        steps, last = settings.steps, None
    check_schedule(settings.trainer, steps)
    return Order(examples, size, settings.seed, last), steps


def _of_learner(settings: SftSettings) -> TrainerSettings:
    return TrainerSettings(**settings.trainer.model_dump(), loss=LossSettings(policy="policy_gradient"))


def _show(display: Display, line: StepLine, steps: int, training: SupervisedTraining) -> None:
    before, newest = training.loss_before, training.newest_loss
    held = "" if before is None or newest is None else f" · held out {before:.3f} → {newest:.3f}"
    display.advance("training", f"loss {line.loss:.3f}{held}", line.step, steps)
    told = line.held_out_loss is not None
    if told or (not display.has_bar and line.step % math.ceil(steps / _LINES_OF_A_RUN) == 0):
        display.say(
            "step",
            step=f"{line.step}/{steps}",
            loss=round(line.loss, 4),
            **({"held_out": round(newest, 4)} if told and newest is not None else {}),
            tokens_per_s=round(line.tokens / max(line.seconds, 1e-9)),
        )
