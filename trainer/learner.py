"""One optimizer step on one packed batch.

    micro-batch ─► logprobs ─► per-token loss ─► masked sum / N ─► backward        N: fresh tokens of the whole batch, so
    micro-batch ─► …                                              ─► backward         the split changes nothing
                                                    clip ─► AdamW ─► policy version + 1

Deterministic: the same weights, optimizer state and batch give the same bytes (a restarted trainer relies on it).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.settings import TrainerSettings
from trainer.logprobs import token_logprobs
from trainer.objective import Objective, masked_sum
from trainer.packing import MicroBatch, PackedBatch
from trainer.step_sums import StepSums, TokenStatistics


class Learner:
    """The policy under training, its optimizer, and the version it has reached."""

    def __init__(self, model: PreTrainedModel, settings: TrainerSettings, version: int = 0) -> None:
        # No dropout: the ratio to the engine's policy must come from the weights alone.
        self.model = model.eval()
        self.version = version
        self.objective = Objective(settings.loss)
        self._settings = settings
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def weights(self) -> dict[str, Tensor]:
        """The live weights by their Hugging Face names, a tied one under its first name only."""
        return named_weights(self.model)

    def step(self, batch: PackedBatch) -> TokenStatistics:
        """One optimizer step; `version` is one more afterwards.

        A batch that gives no gradient (all advantages 0, or every token over K) is a step all the same: the gradient is
        zero, and only momentum moves the weights.
        """
        proximal = [self._proximal(micro) for micro in batch.micro_batches]
        sums = StepSums(self.model.device)
        for micro, before in zip(batch.micro_batches, proximal, strict=True):
            self._accumulate(micro, before, batch.tokens, sums)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_grad_norm)
        rate = self.learning_rate(self.version)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return sums.read(grad_norm)

    def learning_rate(self, version: int) -> float:
        """That of the step from `version`: a linear ramp over the first `warmup_steps` steps."""
        return self._settings.learning_rate * min(1.0, (version + 1) / max(1, self._settings.warmup_steps))

    @torch.no_grad()
    def _proximal(self, micro: MicroBatch) -> Tensor | None:
        if not self.objective.needs_proximal:
            return None
        return token_logprobs(self.model, micro.input_ids, micro.first, micro.temperature)

    def _accumulate(self, micro: MicroBatch, proximal: Tensor | None, tokens: int, sums: StepSums) -> None:
        logprobs = token_logprobs(self.model, micro.input_ids, micro.first, micro.temperature)
        # Where nothing is trained the ratio is to be 1 and not whatever the difference to a padding's 0 would give.
        behaviour = torch.where(micro.fresh, micro.behaviour, logprobs.detach())
        judged = self.objective(logprobs, behaviour, proximal, micro.advantages)
        loss = masked_sum(judged.loss, micro.fresh) / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        sums.add(micro, logprobs.detach(), loss.detach(), judged.clipped)


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """What a Hugging Face folder of `model` holds: its state without second names of tied weights."""
    state: Mapping[str, Tensor] = model.state_dict()
    seen: set[int] = set()
    weights = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor
    return weights
