"""Supervised warm start (SFT): a short run on demonstrations that teaches the tiny policy the format and a first skill.

    for each phase:  fresh AdamW ─► steps of `batch` demonstrations ─► (sampled accuracy ≥ the bar: stop early)

Loss: mean cross-entropy over the tokens of the trained parts of a batch. Deterministic for a seed and a thread count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from services.wire.errors import RollmeshError
from services.wire.tasks.demonstrations import Demonstration, Phase, Question, Recipe
from trainer.model.logprobs import token_logprobs
from trainer.sft.accuracy import sampled_accuracy
from trainer.sft.data import read_checks, read_demonstrations
from trainer.sft.tiny_model import build_model, build_tokenizer

_CLIP_GRAD_NORM = 1.0
# An answer may be a little longer than the longest demonstrated one and still be right.
_SPARE_TOKENS = 4
_ENCODED_AT_ONCE = 2048


class WarmStartError(RollmeshError):
    """A phase ended below its accuracy bar: training on would only waste the run."""

    code = "warm_start"


@dataclass(frozen=True)
class Progress:
    """Where a warm start is. `accuracy` is set where it was just measured."""

    phase: str
    step: int
    steps: int
    loss: float
    accuracy: float | None
    seconds: float


Report = Callable[[Progress], None]


def warm_start(
    folder: Path, recipe: Recipe, seed: int, report: Report, model: Qwen3ForCausalLM | None = None
) -> Qwen3ForCausalLM:
    """Train `model`, else a fresh tiny policy, by the recipe in `folder`; returns it in float32.

    Raises WarmStartError when a phase with a bar ends below it, UsageError for files that are not what the recipe says.
    """
    model = build_model(seed) if model is None else model
    # No dropout: the supervised run is to be repeatable, and RL needs the trainer to agree with the engine.
    model.eval()
    tokenizer = build_tokenizer()
    checks = read_checks(folder / recipe.check)
    generator = torch.Generator().manual_seed(seed)
    for phase in recipe.phases:
        demonstrations = read_demonstrations(folder / phase.file)
        _PhaseRun(model, tokenizer, phase, demonstrations, checks, generator, report).run()
    return model


class _PhaseRun:
    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        phase: Phase,
        demonstrations: Sequence[Demonstration],
        checks: Sequence[Question],
        generator: torch.Generator,
        report: Report,
    ) -> None:
        self._model, self._tokenizer, self._phase = model, tokenizer, phase
        self._examples = _Examples(tokenizer, demonstrations)
        self._checks, self._generator, self._report = checks, generator, report
        self._started = time.monotonic()

    def run(self) -> None:
        phase = self._phase
        if phase.stop_at_accuracy is not None and not self._checks:
            raise WarmStartError(f"phase {phase.name} has an accuracy bar and no checks", "add lines to the check file")
        optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=phase.learning_rate,
            betas=phase.betas,
            weight_decay=phase.weight_decay,
            fused=True,
        )
        accuracy = None
        for step in range(1, phase.steps + 1):
            optimizer.param_groups[0]["lr"] = phase.learning_rate * min(1.0, step / max(1, phase.warmup_steps))
            loss = self._step(optimizer, step - 1)
            if step % phase.check_every and step < phase.steps:
                continue
            accuracy = self._accuracy()
            elapsed = time.monotonic() - self._started
            self._report(Progress(phase.name, step, phase.steps, float(loss), accuracy, elapsed))
            if accuracy is not None and accuracy >= (phase.stop_at_accuracy or 0.0):
                return
        if accuracy is not None:
            raise WarmStartError(
                f"phase {phase.name} reached {accuracy:.2f} after {phase.steps} steps, wanted {phase.stop_at_accuracy}",
                "try another seed, or give the phase more steps in recipe.json",
            )

    def _step(self, optimizer: torch.optim.AdamW, index: int) -> torch.Tensor:
        ids, trained, first = self._examples.batch(index * self._phase.batch, self._phase.batch)
        logprobs = token_logprobs(self._model, ids, first)
        loss = -(logprobs * trained).sum() / trained.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _accuracy(self) -> float | None:
        if self._phase.stop_at_accuracy is None:
            return None
        longest = self._examples.longest_trained + _SPARE_TOKENS
        return sampled_accuracy(self._model, self._tokenizer, self._checks, longest, self._generator)


class _Examples:
    """Demonstrations as tokens, each with a flag that says whether it is trained on.

    Encoded some at a time, when their turn comes: a phase that reaches its bar early has no use for the rest.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, demonstrations: Sequence[Demonstration]) -> None:
        self._demonstrations = demonstrations
        self._rows: list[tuple[list[int], list[bool]]] = []
        self._padding = int(tokenizer.pad_token_id)
        # Without the Python around it, which takes as long again.
        self._encode = tokenizer.backend_tokenizer.encode_batch_fast
        # One token a character (`build_tokenizer`).
        self.longest_trained = max(
            sum(len(text) for text, is_trained in demonstration.parts if is_trained) for demonstration in demonstrations
        )

    def batch(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """`count` examples from number `start` on (from the beginning again after the last).

        Returns ids int64 `[B, T]`, the trained mask float32 `[B, T − first]` and `first`, the first column trained on.
        """
        while len(self._rows) < min(start + count, len(self._demonstrations)):
            self._encode_more()
        rows = [self._rows[(start + offset) % len(self._demonstrations)] for offset in range(count)]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [self._padding] * (longest - len(row)) for row, _ in rows])
        trained = torch.tensor([row + [False] * (longest - len(row)) for _, row in rows], dtype=torch.float32)
        first = max(1, int(trained.any(dim=0).float().argmax()))
        return ids, trained[:, first:], first

    def _encode_more(self) -> None:
        some = self._demonstrations[len(self._rows) : len(self._rows) + _ENCODED_AT_ONCE]
        texts = [text for demonstration in some for text, _ in demonstration.parts]
        encoded = iter(self._encode(texts, add_special_tokens=False))
        for demonstration in some:
            ids: list[int] = []
            trained: list[bool] = []
            for _, is_trained in demonstration.parts:
                piece = next(encoded).ids
                ids += piece
                trained += [is_trained] * len(piece)
            self._rows.append((ids, trained))
