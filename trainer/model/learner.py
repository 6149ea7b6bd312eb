"""Optimizer steps on a packed batch: one, or one for each part of it.

    micro-batch ─► logprobs ─► per-token loss ─► its share / N ─► backward         N: fresh tokens of the whole part, so
    micro-batch ─► …                                              ─► backward         the split changes nothing
                                         clip ─► finite? ─► AdamW ─► policy version + 1 ─► next part

Deterministic: the same weights, optimizer state and batch give the same bytes (a restarted trainer relies on it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.config.settings import TrainerSettings
from services.wire.errors import UsageError
from services.wire.run_metrics import TokenStatistics
from trainer.algorithms.losses.objective import Objective, TokenTerms
from trainer.algorithms.losses.tokens import BatchSize
from trainer.data.packing import MicroBatch, PackedBatch
from trainer.model.anomaly import check_finite
from trainer.model.forward import PackedForward, Separation
from trainer.model.logprobs import sampled_terms
from trainer.model.router_loss import RouterLoss
from trainer.model.token_stats import StepSums
from weight_bus.manifest.published import PublishedNames


class Learner:
    """The policy under training, its optimizer, and the version it has reached."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSettings,
        version: int = 0,
        reference: PackedForward | None = None,
    ) -> None:
        """`reference`: the policy that the run began with. Raises UsageError where the loss needs it and there is none, and
        where it balances experts that the model has not."""
        # No dropout: the ratio to the engine's policy must come from the weights alone.
        self.model = model.eval()
        self.version = version
        self.objective = Objective(settings.loss)
        self.settings = settings
        """Read at each step: learning rate and bound of the gradient may change between two of them."""
        if self.objective.needs_reference and reference is None:
            raise UsageError("trainer.loss.kl needs the policy that the run began with", "give the learner a reference")
        self._reference = reference if self.objective.needs_reference else None
        self._policy = PackedForward(self.model)
        self._router = RouterLoss(model) if settings.loss.router_aux else None
        state = model.state_dict(keep_vars=True)
        self._live = {name: state[name] for name in named_weights(model)}
        """These stay the same objects, whatever is loaded into them and wherever their data is moved."""
        self._published = PublishedNames(model, self._live)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @property
    def separation(self) -> Separation:
        """How rows that stand in one are kept apart."""
        return self._policy.separation

    def weights(self) -> dict[str, Tensor]:
        """Views of the live weights, by the names that a Hugging Face folder of them has; a tied one under its first."""
        return self._published.views({name: tensor.detach() for name, tensor in self._live.items()})

    def step(self, batch: PackedBatch) -> TokenStatistics:
        """The one optimizer step of a batch that is not split."""
        (statistics,) = self.steps([batch])
        return statistics

    def steps(self, batch: Sequence[PackedBatch]) -> Iterator[TokenStatistics]:
        """The optimizer steps of one batch, one for each part of it; `version` is one more after each.

        All parts are held against the policy before the batch, where the loss asks for it: before the first step that is
        the current one. A part that gives no gradient (all advantages 0, or every token over K) is a step all the same: the
        gradient is zero, and only momentum moves the weights. Raises AnomalyError before the step of a part whose loss or
        gradient is not finite.
        """
        for part, proximal in zip(batch, self.proximals(batch), strict=True):
            statistics = self.gradient(part, proximal)
            self.apply()
            yield statistics

    def proximals(self, batch: Sequence[PackedBatch]) -> list[list[Tensor | None]]:
        """What each part is held against, where the loss asks for it: logprobs before the batch's first step."""
        nothing: list[Tensor | None] = [None] * len(batch[0].micro_batches)
        return [nothing, *([self._proximal(micro) for micro in part.micro_batches] for part in batch[1:])]

    def gradient(self, batch: PackedBatch, proximal: Sequence[Tensor | None]) -> TokenStatistics:
        """Compute the gradient of one part; `apply` makes the step. Raises AnomalyError where it is not finite."""
        sums = StepSums(self.model.device)
        for micro, before in zip(batch.micro_batches, proximal, strict=True):
            self._accumulate(micro, before, batch.size, sums)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.clip_grad_norm)
        statistics = sums.read(grad_norm)
        check_finite(self.version, "policy", statistics.loss, statistics.grad_norm)
        return statistics

    def apply(self) -> None:
        """Make the step of the gradient that was computed."""
        rate = self.learning_rate(self.version)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # First, so that whatever fails from here on is known for more than a failed pass.
        self.version += 1
        self.optimizer.step()
        self.forget_gradient()

    def forget_gradient(self) -> None:
        """As before the last `gradient`."""
        self.optimizer.zero_grad(set_to_none=True)

    def learning_rate(self, version: int) -> float:
        """That of the step from `version`: a linear ramp over the first `warmup_steps` steps."""
        return self.settings.learning_rate * min(1.0, (version + 1) / max(1, self.settings.warmup_steps))

    @torch.no_grad()
    def _proximal(self, micro: MicroBatch) -> Tensor | None:
        if not self.objective.needs_proximal:
            return None
        return sampled_terms(self._policy, micro)[0][micro.chosen]

    @torch.no_grad()
    def _of_reference(self, micro: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        return sampled_terms(self._reference, micro)[0][micro.chosen]

    def _accumulate(self, micro: MicroBatch, proximal: Tensor | None, size: BatchSize, sums: StepSums) -> None:
        with nullcontext() if self._router is None else self._router.recording():
            logprobs, entropy = sampled_terms(self._policy, micro, entropy=self.objective.needs_entropy)
        terms = TokenTerms(
            logprobs=logprobs[micro.chosen],
            behaviour=micro.behaviour[micro.chosen],
            proximal=proximal,
            advantages=micro.advantages,
            staleness=micro.staleness,
            segment=micro.segment,
            segments=micro.segments,
            reference=self._of_reference(micro),
            entropy=None if entropy is None else entropy[micro.chosen],
        )
        judged = self.objective(terms)
        loss = self.objective.mean(judged.loss, terms.segment, terms.segments, size)
        if self._router is not None:
            # It is no mean over tokens: each pass has one, which counts as its fresh tokens do.
            loss = loss + self.settings.loss.router_aux * self._router.value() * (len(micro.chosen) / size.tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        sums.add(micro, logprobs.detach(), loss.detach(), judged)


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state of `model` by its own names, without second names of tied weights."""
    state: Mapping[str, Tensor] = model.state_dict()
    seen: set[int] = set()
    weights = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor
    return weights
