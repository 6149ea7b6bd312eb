"""Routing replay: a mixture's layers choose the experts that the engine chose, and weigh them by their own router.

    row with experts ──► router's logits ──► softmax at the given experts (, divided by their sum) ──► experts
                             └── gradients: through the weights, as ever; which experts is no function of the weights

Engine and trainer compute a router's logits by other kernels, perhaps in another precision or of another version: where two
experts are nearly tied they choose otherwise, and the token is another function altogether. (Rollout routing replay: Ma et
al. 2025, arXiv:2510.11370.)

Hooks on the routers, which `transformers` names for each family: their output is (logits, weights, indices). They read what
the newest pass was given until the next one begins: a backward pass may compute a layer again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn, where
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from services.wire.errors import UsageError

_TOLERANCE = 1e-3


class RoutingReplay:
    """Of `model`. Raises UsageError where it has no routers. Whether it weighs experts in a way that is known is seen in a
    trial."""

    def __init__(self, model: PreTrainedModel) -> None:
        recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
        routers = []
        if isinstance(recorder, OutputRecorder):
            routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]
        if not routers:
            raise _unknown(model, "has no routers")
        self._model, self.layers = model, len(routers)
        self.top = self.experts = 0
        """How many each layer chooses, and of how many: known after the trial."""
        self._given: Tensor | None = None
        self._told: list[bool | None] = []
        self._trying = False
        self._divides = True
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._hook(layer))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts that each chooses, and of how many."""
        return self.layers, self.top, self.experts

    def give(self, experts: Tensor | None) -> None:
        """From the next pass on: int16 `[1, T, layers · top]` of its tokens, −1 for the router's own; None for those of
        all."""
        self._given = None if experts is None else experts[0].view(experts.shape[1], self.layers, -1)

    def begin_trial(self) -> None:
        """The passes from here to `end_trial` show how the model weighs what it chooses."""
        self._trying, self._told = True, []

    def end_trial(self) -> None:
        """Raises UsageError where the passes since `begin_trial` have not shown it."""
        self._trying = False
        if not self._told or None in self._told or len(set(self._told)) != 1:
            raise _unknown(self._model, "weighs its experts in a way that is not known")
        self._divides = bool(self._told[0])

    def _hook(self, layer: int) -> Any:
        def replay(_: nn.Module, __: tuple[object, ...], output: Any) -> Any:
            if self._trying:
                self._told.append(_divides(output))
                if self._told[-1] is not None:
                    self.experts, self.top = output[0].shape[-1], output[2].shape[-1]
            if self._given is None:
                return None
            logits, weights, chosen = output
            wanted = self._given[:, layer].to(chosen.dtype)
            used = where(wanted >= 0, wanted, chosen)
            return logits, _weights(logits, used, divides=self._divides).to(weights.dtype), used

        return replay


def _weights(logits: Tensor, chosen: Tensor, *, divides: bool) -> Tensor:
    """float32 `[tokens, top]`."""
    weights = logits.float().softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if divides else weights


def _divides(output: object) -> bool | None:
    """Whether a router divides the weights of the chosen by their sum; None where it does something else."""
    if not isinstance(output, tuple) or len(output) != 3:
        return None
    logits, weights, chosen = output
    if weights.shape != chosen.shape or chosen.is_floating_point():
        return None
    for divides in (True, False):
        found = _weights(logits, chosen, divides=divides)
        if float((found - weights.float()).abs().max()) <= _TOLERANCE:
            return divides
    return None


def _unknown(model: PreTrainedModel, why: str) -> UsageError:
    return UsageError(f"rollout.routing_replay: a {model.config.model_type} model {why}", "leave it out")
