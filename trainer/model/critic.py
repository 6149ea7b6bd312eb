"""Critic (value model): the return to be expected before each token that the policy generates.

    run's first policy ──its layers──► hidden state before token t ──head──► V_t          the head begins at 0

One optimizer step of its own for each of the policy's, on the same tokens: none over K reaches its loss either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from services.config.settings import TrainerSettings
from services.wire.run_metrics import ValueStatistics
from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.batch import Float64Array
from trainer.data.packing import MicroBatch, PackedBatch
from trainer.data.rows import Rows
from trainer.memory.host_state import Places
from trainer.memory.host_weights import HostWeights
from trainer.model.anomaly import check_finite
from trainer.model.forward import PackedForward, layers_of
from trainer.model.logprobs import measure
from trainer.model.optimizer import make_optimizer, outer_weights
from trainer.model.precision import Precision
from trainer.parallel.gradients import clip_gradients
from trainer.parallel.orders import Measure, passes_of, tell_shares
from trainer.parallel.ranks import Ranks
from trainer.parallel.sharding import Fill, shard


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> Tensor:
    """The critic's loss (PPO, Schulman et al. 2017, arXiv:1707.06347, equation 9, with the bound of its authors' code).

        ℓ_t = ½ · max( (V_t − R_t)², (clip(V_t, V_old,t − ε, V_old,t + ε) − R_t)² )

    V_old: the value before the batch, so that the bound binds from the second optimizer step on a batch on. Per token; all
    `[N]`, `values` with gradient.
    """
    bounded = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (bounded - returns).square())


class ValueModel(nn.Module):
    """A language model's layers with a head of one number."""

    def __init__(
        self,
        policy: PreTrainedModel,
        precision: Precision = "float32",
        context: DeviceMesh | None = None,
        ranks: Ranks | None = None,
        fill: Fill | None = None,
        *,
        reshard: bool = True,
    ) -> None:
        """`policy`: whose layers become this model's own; its language head is not used. `precision`, `context`: of its
        passes, as `PackedForward` has them. `ranks`: over which it is sharded, `reshard` as `shard` has it. `fill`: as the
        learner's."""
        super().__init__()
        self.policy = policy.eval()
        device = policy.device if ranks is None else ranks.device
        self.head = nn.Linear(policy.config.get_text_config().hidden_size, 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if ranks is not None:
            shard(self, ranks, reshard=reshard)
        if fill is not None:
            fill(policy, device)
        self._packed = PackedForward(self.policy, precision, context, root=self)

    @property
    def stem_width(self) -> int | None:
        return self._packed.stem_width

    def forward(self, micro: MicroBatch) -> Tensor:
        """float32 `[N]`: the value before each fresh token."""
        return self._packed.each(micro.row, micro.places[micro.chosen] - 1, self._value)

    def _value(self, hidden: Tensor) -> Tensor:
        value: Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()
        return value


class Critic:
    """The value function under training and its optimizer. Deterministic, as the learner is."""

    def __init__(
        self,
        model: ValueModel,
        settings: TrainerSettings,
        places: Places | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`places`: where its weights are held with `trainer.offload_idle`. `ranks`: that `model` is sharded over."""
        self.model, self._device = model, model.head.weight.device
        self._ranks = Ranks.alone(self._device) if ranks is None else ranks
        self.settings = settings
        """As the learner's."""
        layers = layers_of(model.policy).parameters()
        self._parameters = [*(each for each in layers if each.requires_grad), *model.head.parameters()]
        outer = [*outer_weights(model.policy), *model.head.parameters()]
        self.optimizer = make_optimizer(self._parameters, settings, settings.advantage.critic.learning_rate, outer)
        self._host = HostWeights(model, places) if settings.offload_idle else None

    def values(self, trajectories: Sequence[Trajectory]) -> Float64Array:
        """`[N]`: the value before each sampled token of each segment of each trajectory, in their order.

        For rank 0: the others get an order.
        """
        budget = self.settings.micro_batch_tokens

        def measuring(shares: Sequence[Sequence[Rows | None]]) -> None:
            tell_shares(self._ranks, lambda share: Measure("critic", passes_of(shares[share])))

        with nullcontext() if self._host is None else self._host.used():
            return measure(
                trajectories, self.model, budget, self.model.stem_width, ranks=self._ranks, measuring=measuring
            )

    def step(self, batch: PackedBatch, steps: int = 0) -> ValueStatistics:
        """One optimizer step towards the batch's returns. A batch without a fresh token moves nothing."""
        statistics = self.gradient(batch, steps)
        self.apply()
        return statistics

    def gradient(self, batch: PackedBatch, steps: int) -> ValueStatistics:
        """Compute the gradient of one part; `apply` makes the step. `steps`: the policy's so far, for messages.

        Raises AnomalyError where the loss or the gradient is not finite.
        """
        if not batch.micro_batches:
            return ValueStatistics()
        if self._host is not None:
            self._host.load()
        total = torch.zeros((), device=self._device)
        for micro in batch.micro_batches:
            before, returns = _targets(micro)
            losses = value_loss(self.model(micro), before, returns, self.settings.advantage.critic.clip)
            loss = losses.sum() / batch.fresh
            (loss * self._ranks.averaged).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        grad_norm = clip_gradients(self._parameters, self.settings.clip_grad_norm)
        told = _Told(float(total), *(column.tobytes() for column in _columns(batch.micro_batches)))
        found = [told]
        if self._ranks.several:
            parts = self._ranks.of_shares(self._ranks.gather(msgspec.msgpack.encode(told)))
            found = [msgspec.msgpack.decode(part, type=_Told) for part in parts]
        loss_of_all = sum(part.loss for part in found)
        check_finite(steps, "critic", loss_of_all, float(grad_norm))
        return ValueStatistics(value_loss=loss_of_all, value_explained=_explained(found))

    def apply(self) -> None:
        """Make the step of the gradient that was computed; nothing where there was no fresh token."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._host is not None:
            self._host.store(changed=True)

    def forget_gradient(self) -> None:
        """As before the last `gradient`."""
        self.optimizer.zero_grad(set_to_none=True)
        if self._host is not None:
            self._host.store()


def _targets(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    if micro.values is None or micro.returns is None:
        raise ValueError("the batch was not given advantages with a critic's values")
    return micro.values, micro.returns


class _Told(msgspec.Struct, frozen=True):
    """Of one rank's tokens: their part of the loss; float64, the values before the batch and the returns."""

    loss: float
    before: bytes
    returns: bytes


def _columns(micro_batches: Sequence[MicroBatch]) -> Iterator[Float64Array]:
    for column in zip(*(_targets(micro) for micro in micro_batches), strict=True):
        # Each by itself: they are numbers also where a pass has none (`trainer.planning`).
        yield np.concatenate([each.cpu().numpy() for each in column]).astype(np.float64)


def _explained(parts: Sequence[_Told]) -> float | None:
    before = np.frombuffer(b"".join(part.before for part in parts))
    returns = np.frombuffer(b"".join(part.returns for part in parts))
    spread = float(np.var(returns))
    return 1.0 - float(np.var(returns - before)) / spread if spread > 0.0 else None
