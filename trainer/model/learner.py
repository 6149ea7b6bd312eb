"""Optimizer steps on a packed batch: one, or one for each part of it.

    micro-batch ─► logprobs ─► per-token loss ─► its share / N ─► backward         N: fresh tokens of the whole part, so
    micro-batch ─► …                                              ─► backward         the split changes nothing
                                         clip ─► finite? ─► optimizer ─► policy version + 1 ─► next part

The same weights, optimizer state and batch give the same bytes on a CPU, and with `trainer.deterministic`; elsewhere a
restarted trainer may come to others (`services.policies.versions`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.config.settings import TrainerSettings
from services.wire.errors import UsageError
from services.wire.packed import Float32Array
from services.wire.run_metrics import TokenStatistics
from trainer.algorithms.losses.objective import Objective, TokenTerms
from trainer.algorithms.losses.tokens import BatchSize
from trainer.data.packing import MicroBatch, PackedBatch
from trainer.memory.activations import recompute_activations
from trainer.memory.device_use import Gauge
from trainer.model.adapters import Adapters
from trainer.model.anomaly import check_finite
from trainer.model.compilation import compile_layers
from trainer.model.forward import PackedForward, Separation
from trainer.model.logprobs import Reference, sampled_terms
from trainer.model.optimizer import make_optimizer, outer_weights
from trainer.model.routers import RouterLoss, RoutingReplay
from trainer.model.token_stats import StepSums
from trainer.parallel.gradients import clip_gradients
from trainer.parallel.ranks import Ranks
from trainer.parallel.sharding import Fill, cut, shard
from weight_bus.manifest.computed import PublishedTensor, computed
from weight_bus.manifest.published import PublishedNames


class Learner:
    """The policy under training, its optimizer, and the version it has reached."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSettings,
        version: int = 0,
        reference: Reference | None = None,
        run_steps: int | None = None,
        adapters: Adapters | None = None,
        ranks: Ranks | None = None,
        fill: Fill | None = None,
        replays: bool = False,
    ) -> None:
        """`reference`: the policy that the run began with; `run_steps`: optimizer steps of the whole run; `adapters`: those
        of `model`, where they alone are trained: with them off the model is the reference itself. `ranks`: over which the
        weights are sharded; each calls the same methods at the same time, with its own passes. `fill`: what reads the
        weights of a `model` on meta. `replays`: its layers choose the experts that rows say.

        Raises UsageError where the loss needs a reference, or the schedule the run's steps, and there is none, where the
        loss balances experts that the model has not, and where the choice of experts cannot be replayed.
        """
        # No dropout: the ratio to the engine's policy must come from the weights alone.
        self.model = model.eval()
        self.version = version
        self.skipped = 0
        """Versions below it that no optimizer step made: a restart went on above them (`skip_to`)."""
        self.objective = Objective(settings.loss)
        self.settings = settings
        """Read at each step, as `run_steps` is: learning rate and bound of the gradient may change between two of them."""
        self.run_steps = run_steps
        self._ranks = Ranks.alone(model.device) if ranks is None else ranks
        cut(self.model, self._ranks)
        recompute_activations(self.model, settings.activation_checkpointing, offload=settings.activation_offload)
        # Before the model's class is another, of torch's.
        self._router = RouterLoss(model) if settings.loss.router_aux else None
        self.replay = RoutingReplay(model) if replays else None
        shard(self.model, self._ranks, reshard=settings.parallel.reshard_after_forward is not False)
        if fill is not None:
            fill(self.model, self._ranks.device)
        self._policy = PackedForward(self.model, settings.dtype, self._ranks.context, replay=self.replay)
        self.adapters = adapters
        self.publishes_adapters = False
        """Alone, without the weights that they belong to (`weights.publish`)."""
        self.keeps_logprobs = False
        self.sampled_logprobs: list[Float32Array] = []
        """Of the part that `gradient` computed last, where it `keeps_logprobs`: of each share of the ranks, those of its
        sampled tokens before the step, in the order of its passes."""
        self.gauge = Gauge(model, self.stem_width, frozen=adapters is not None)
        self.reference = Reference(self._policy, adapters.off) if adapters is not None else reference
        if self.objective.needs_reference and self.reference is None:
            what = "trainer.loss.kl" if settings.loss.kl else f"trainer.loss.policy={settings.loss.policy}"
            raise UsageError(f"{what} needs the policy that the run began with", "give the learner a reference")
        if settings.compile:
            compile_layers(self.model)
        state = model.state_dict(keep_vars=True)
        self._live = {name: state[name] for name in named_weights(model)}
        """These stay the same objects, whatever is loaded into them and wherever their data is moved."""
        self._names = PublishedNames(model, self._unnamed())
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(
            self._parameters, settings, self.learning_rate(version), outer_weights(self.model)
        )

    @property
    def steps_made(self) -> int:
        """Optimizer steps behind the weights."""
        return self.version - self.skipped

    def skip_to(self, version: int) -> None:
        """Go on as `version`, with the weights as they are. Raises ValueError unless it is a higher one."""
        if version <= self.version:
            raise ValueError(f"version {version} is not above {self.version}")
        self.skipped += version - self.version
        self.version = version

    @property
    def separation(self) -> Separation:
        """How rows that stand in one are kept apart."""
        return self._policy.separation

    @property
    def stem_width(self) -> int | None:
        """As `trainer.data.packing.split_batch` takes it."""
        return self._policy.stem_width

    def published(self) -> dict[str, PublishedTensor]:
        """Views of the live weights, by the names that a Hugging Face folder of them has; a tied one under its first.

        Those of layers with adapters are computed when they are copied, so that never more than one of them exists. Where
        it `publishes_adapters`: theirs alone.
        """
        if self.publishes_adapters and self.adapters is not None:
            return self.adapters.alone()
        return self._merged()

    def weights(self) -> dict[str, Tensor]:
        """As published, all of them; those of layers with adapters as copies."""
        return {name: computed(tensor) for name, tensor in self._merged().items()}

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

    def proximals(self, batch: Sequence[PackedBatch], minibatches: int | None = None) -> list[list[Tensor | None]]:
        """What each part is held against, where the loss asks for it: logprobs before the batch's first step.

        `minibatches`: after so many parts the same ones come once more, less the tokens that have become too old.
        """
        found: list[list[Tensor | None]] = [[None] * len(batch[0].micro_batches)]
        for number, part in enumerate(batch[1:], start=1):
            before = number - (minibatches or len(batch))
            # Tokens only ever leave: as many are the same ones. The first part's are not computed for its first step.
            if before > 0 and batch[before].size.tokens == part.size.tokens:
                found.append(found[before])
            else:
                found.append([self._proximal(micro) for micro in part.micro_batches])
        return found

    def gradient(self, batch: PackedBatch, proximal: Sequence[Tensor | None]) -> TokenStatistics:
        """Compute the gradient of one part; `apply` makes the step. Raises AnomalyError where it is not finite.

        While the policy stays (`stays`) there is none, and the part is only measured.
        """
        sums = StepSums(self.model.device, keeps_logprobs=self.keeps_logprobs)
        # Before all passes of the policy, whose graphs hold on to their activations.
        references = self._of_reference(batch)
        with torch.set_grad_enabled(not self.stays):
            for micro, before, reference in zip(batch.micro_batches, proximal, references, strict=True):
                self._accumulate(micro, before, reference, batch.size, sums)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grad_norm = clip_gradients(self._parameters, self.settings.clip_grad_norm)
        statistics = sums.read(grad_norm, self._ranks)
        self.sampled_logprobs = sums.logprobs
        check_finite(self.steps_made, "policy", statistics.loss, statistics.grad_norm)
        return statistics

    def apply(self) -> None:
        """Make the step of the gradient that was computed; of a policy that stays, only its version is another."""
        rate, stays = self.learning_rate(self.steps_made), self.stays
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # First, so that whatever fails from here on is known for more than a failed pass.
        self.version += 1
        if not stays:
            self.optimizer.step()
        self.forget_gradient()

    def forget_gradient(self) -> None:
        """As before the last `gradient`."""
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """float32 `[N]`: of each fresh token under the policy as it is, at the temperature that it was sampled with."""
        return sampled_terms(self._policy, micro)[0][micro.chosen]

    @property
    def stays(self) -> bool:
        """Whether the next step is one of the critic's alone (`advantage.critic.pretrain_steps`)."""
        return self.steps_made < self.settings.advantage.critic.pretrain_steps

    def learning_rate(self, steps: int) -> float:
        """That of the step after so many; 0 while the policy stays, whose schedule begins behind that.

        Raises UsageError where the schedule needs the run's steps and has none.
        """
        settings, before = self.settings, self.settings.advantage.critic.pretrain_steps
        run_steps = None if self.run_steps is None else self.run_steps - before
        try:
            schedule = settings.schedule.of_run(settings.warmup_steps, run_steps)
        except ValueError as error:
            raise UsageError(f"trainer.{error}", "give the learner the run's steps") from error
        return 0.0 if steps < before else settings.learning_rate * schedule.factor(steps - before)

    def _merged(self) -> dict[str, PublishedTensor]:
        return self._names.views(self._unnamed())

    def _unnamed(self) -> dict[str, PublishedTensor]:
        """The live weights by the names that the model has for them without adapters."""
        live = {name: tensor.detach() for name, tensor in self._live.items()}
        return {**live} if self.adapters is None else self.adapters.merged(live)

    def _proximal(self, micro: MicroBatch) -> Tensor | None:
        return self.logprobs(micro) if self.objective.needs_proximal else None

    def _of_reference(self, batch: PackedBatch) -> list[Tensor | None]:
        if self.reference is None or not self.objective.needs_reference:
            return [None] * len(batch.micro_batches)
        with self.reference.within():
            return [self.reference.logprobs(micro) for micro in batch.micro_batches]

    def _accumulate(
        self, micro: MicroBatch, proximal: Tensor | None, reference: Tensor | None, size: BatchSize, sums: StepSums
    ) -> None:
        with nullcontext() if self._router is None else self._router.recording():
            logprobs, entropy = sampled_terms(self._policy, micro, entropy=self.objective.needs_entropy)
        if micro.idle:
            self._backward(logprobs.sum())
            return
        terms = TokenTerms(
            logprobs=logprobs[micro.chosen],
            behaviour=micro.behaviour[micro.chosen],
            proximal=proximal,
            advantages=micro.advantages,
            staleness=micro.staleness,
            segment=micro.segment,
            segments=micro.segments,
            reference=reference,
            entropy=None if entropy is None else entropy[micro.chosen],
            group=micro.group[micro.segment] if self.objective.reads("group") else None,
            teacher=micro.teacher,
            values=micro.values,
            returns=micro.returns,
        )
        judged = self.objective(terms)
        loss = self.objective.mean(judged.loss, terms.segment, terms.segments, size)
        if micro.right is not None and self.settings.loss.positive:
            loss = loss + self.objective.positive(terms.logprobs, micro.right[micro.segment], size)
        if self._router is not None:
            # It is no mean over tokens: each pass has one, which counts as its fresh tokens do.
            balance = self._router.value(self._policy.part_of(micro.row))
            loss = loss + self.settings.loss.router_aux * balance * (len(micro.chosen) / size.tokens)
        self._backward(loss)
        sums.add(micro, logprobs.detach(), loss.detach(), judged)

    def _backward(self, loss: Tensor) -> None:
        """`loss`: this rank's part of the sum over ranks. Gradients are averaged over them."""
        if torch.is_grad_enabled():
            (loss * self._ranks.averaged).backward()  # type: ignore[no-untyped-call]


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state of `model` by its own names, without second names of tied weights."""
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    weights = {}
    for name, tensor in state.items():
        # Not by address: weights that are spread over ranks, and the planner's, have none.
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def trained_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Those of `named_weights` that training may change: without frozen ones, which are those of the first policy."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in named_weights(model).items() if name not in frozen}
