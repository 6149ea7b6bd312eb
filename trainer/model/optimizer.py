"""The optimizer of a model: AdamW, or Muon for hidden matrices and AdamW for everything else, as one object.

                          kind = adamw    kind = muon    weight decay
    hidden matrices       AdamW           Muon           yes
    embeddings, heads     AdamW           AdamW          yes
    norms, biases         AdamW           AdamW          only where `decay_norms_and_biases` is set

AdamW: Loshchilov & Hutter 2019, arXiv:1711.05101. Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
Its updates are scaled by 0.2·√max(rows, columns), so that their root mean square is that of AdamW's, and one learning rate
and weight decay serve both (Liu et al. 2025, arXiv:2502.16982, equation 4). Its iterations run in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from services.config.settings import TrainerSettings
from services.wire.errors import UsageError
from trainer.memory.host_state import HostState
from trainer.memory.quantized_state import AdamW8bit


class MuonWithAdamW(Optimizer):
    """Optimizers of different weights that step together. State and groups are shared, so that who saves, loads or sets
    the learning rate sees one optimizer."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        self._groups = [len(part.param_groups) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each part. `closure` is refused: the gradient is there already."""
        if closure is not None:
            raise ValueError("a closure would be called once for each part: compute the gradient before the step")
        first = 0
        for part, groups in zip(self.parts, self._groups, strict=True):
            # Anew each time: `load_state_dict` replaces both.
            part.param_groups, part.state = self.param_groups[first : first + groups], self.state
            part.step()
            first += groups


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    settings: TrainerSettings,
    learning_rate: float,
    outer: Iterable[nn.Parameter] = (),
) -> Optimizer:
    """The optimizer of `parameters` that `settings` ask for. Make it after the weights were placed or sharded.

    `outer`: embeddings and heads, which Muon is not for. Raises UsageError where Muon would get no weight at all, and for
    an offload without an effect.
    """
    every, chosen = list(parameters), settings.optimizer
    if chosen.offload and not any(parameter.is_cuda for parameter in every):
        raise UsageError("trainer.optimizer.offload without a GPU has no effect", "leave it out")
    placed: Callable[[Optimizer], Optimizer] = HostState if chosen.offload else lambda optimizer: optimizer
    if chosen.kind == "adamw":
        return placed(_adamw(every, settings, learning_rate))
    apart = {id(parameter) for parameter in outer}
    hidden = [parameter for parameter in every if parameter.ndim == 2 and id(parameter) not in apart]
    if not hidden:
        raise UsageError(
            "trainer.optimizer.kind=muon would have no effect: the model has no two-dimensional weights but embeddings "
            "and heads",
            "set trainer.optimizer.kind=adamw",
        )
    muon = Muon(
        hidden,
        lr=learning_rate,
        weight_decay=settings.weight_decay,
        momentum=chosen.muon.momentum,
        nesterov=chosen.muon.nesterov,
        ns_steps=chosen.muon.iterations,
        adjust_lr_fn="match_rms_adamw",
    )
    by_muon = {id(parameter) for parameter in hidden}
    others = [parameter for parameter in every if id(parameter) not in by_muon]
    parts = [muon, _adamw(others, settings, learning_rate)] if others else [muon]
    return MuonWithAdamW([placed(part) for part in parts])


def outer_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """The weights of `model`'s embeddings and of its language head."""
    outer: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()
    if head is not None:
        outer.append(head)
    return [parameter for module in outer for parameter in module.parameters()]


def _adamw(parameters: Sequence[nn.Parameter], settings: TrainerSettings, learning_rate: float) -> Optimizer:
    groups, epsilon = _groups(parameters, settings), settings.optimizer.epsilon
    if settings.optimizer.state_bits == 8:
        return AdamW8bit(groups, learning_rate, settings.betas, epsilon)
    # One call takes no weights of several meshes.
    together = len({parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}) < 2
    how = {"fused": True} if together else {"foreach": False}
    return AdamW(groups, lr=learning_rate, betas=settings.betas, eps=epsilon, **how)


def _groups(parameters: Sequence[nn.Parameter], settings: TrainerSettings) -> list[dict[str, Any]]:
    """One group where all weights are decayed alike, else one-dimensional ones (and scalars) apart."""
    decay = settings.weight_decay
    if not decay or settings.optimizer.decay_norms_and_biases:
        return [{"params": list(parameters), "weight_decay": decay}]
    kinds = [
        ([parameter for parameter in parameters if parameter.ndim > 1], decay),
        ([parameter for parameter in parameters if parameter.ndim <= 1], 0.0),
    ]
    return [{"params": chosen, "weight_decay": decay} for chosen, decay in kinds if chosen]
