"""Settings of `rollmesh sft --data`: a tree of its own, with a run's names where the same thing is meant.

file, command line ──► settings ── model folder, machine ──► settings in force, and why each value is what it is
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from services.config.base import Section, changed_fields
from services.config.checks import check_learner
from services.config.fitting import is_set, with_value
from services.config.load import load_tree, origins_of
from services.config.settings import LearnerSettings
from services.policies.training.model_defaults import ModelFacts, fitting
from services.policies.training.threads import threads_left
from services.wire.errors import UsageError

RATE_OF_RL = 2.0
"""The learning rate for a model of some size, as a multiple of RL's: 5e-6 at 8 billion parameters and 2e-6 at 70, as
Lambert et al. 2024 have it (Tülu 3, arXiv:2411.15124)."""

Kind = Literal["chat", "prompt-answer", "tokens"]


class DataSettings(Section):
    """Columns of the data, by their names, and which examples are trained on."""

    kind: Literal["auto", "chat", "prompt-answer", "tokens"] = Field(
        default="auto", description="What an example is; auto: as the columns say that are there"
    )
    messages: str = Field(default="messages", min_length=1, description="chat: the column of messages")
    tools: str = Field(default="tools", min_length=1, description="chat: the column of tools; there need be none")
    prompt: str = Field(default="prompt", min_length=1, description="prompt-answer: the column of prompts, text")
    answer: str = Field(default="answer", min_length=1, description="prompt-answer: the column of answers, text")
    tokens: str = Field(default="tokens", min_length=1, description="tokens: the column of token ids")
    mask: str = Field(
        default="mask", min_length=1, description="tokens: the column that says which are learned, 0 or 1"
    )
    longest: int | None = Field(
        default=None, ge=2, description="Examples of more tokens are dropped, and counted; empty: the model's context"
    )
    held_out: float = Field(
        default=0.05,
        ge=0.0,
        lt=1.0,
        description="Share of the examples, by a hash of each, that is measured, never trained on",
    )


class SavedModelSettings(Section):
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Serving dtype, of the weights written"
    )
    trust_remote_code: bool = Field(default=False, description="Run code that the model folder carries (`auto_map`)")


class HeldOutSettings(Section):
    """The loss of held-out examples."""

    every: int = Field(default=20, ge=0, description="Steps between measurements; 0: before and after alone")
    examples: int = Field(default=256, ge=1, description="Held-out examples that are measured, the same each time")
    keep_best: bool = Field(default=False, description="Write the weights with the lowest loss measured, not the last")


class SftSettings(Section):
    seed: int = Field(default=1, ge=0, description="The order of examples and the first adapters follow from it")
    epochs: int = Field(default=1, ge=1, description="How often each example is trained on")
    steps: int | None = Field(default=None, ge=1, description="Optimizer steps, in place of epochs")
    examples_per_step: int = Field(default=16, ge=1, description="Examples of an optimizer step")
    data: DataSettings = DataSettings()
    model: SavedModelSettings = SavedModelSettings()
    trainer: LearnerSettings = LearnerSettings()
    evaluation: HeldOutSettings = HeldOutSettings()


def load_sft_settings(path: Path | None, overrides: Sequence[str]) -> tuple[SftSettings, dict[str, str]]:
    """The tree, and where each setting came from. Raises UsageError as `services.config.load.load_settings` does."""
    settings = load_tree(SftSettings, path, overrides)
    check_learner(settings.trainer)
    if settings.steps is not None and settings.epochs > 1:
        raise UsageError("steps and epochs both say how long training takes", "give one of them")
    if not settings.data.held_out:
        for name in changed_fields(settings.evaluation):
            raise UsageError(
                f"evaluation.{name} would have no effect with data.held_out=0", "leave it out, or hold some out"
            )
    return settings, origins_of(path, overrides, SftSettings)


def fit_sft(settings: SftSettings, facts: ModelFacts, *, cores: int, gpu: bool) -> tuple[SftSettings, dict[str, str]]:
    """`settings` with what suits the model and the machine where nobody set it; dotted name → why, for what was changed."""
    suiting, changed = fitting(facts, adapters=settings.trainer.lora.rank > 0, gpu=gpu), dict[str, str]()
    for name in ("trainer.learning_rate", "model.dtype"):
        if name in suiting and not is_set(settings, name):
            value, changed[name] = suiting[name].value, suiting[name].why
            if isinstance(value, float):
                value = float(f"{value * RATE_OF_RL:.2g}")
            settings = with_value(settings, name, value)
    if settings.trainer.threads == "auto":
        settings = with_value(settings, "trainer.threads", threads_left(cores, 0, tiny=facts.small))
        changed["trainer.threads"] = f"for {cores} cores"
    return settings, changed
