"""The routers of a mixture of experts: their load-balancing loss, and the replay of what an engine's chose.

Hooks on the routers, which `transformers` names for each family.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from services.wire.errors import UsageError
from trainer.parallel.ulysses import ContextSlice

_TOLERANCE = 1e-3


def _routers(model: PreTrainedModel) -> tuple[list[nn.Module], int]:
    """The routers of its layers, in their order, and which part of their output is the logits. None: not a mixture."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder):
        return [], 0
    return [module for module in model.modules() if isinstance(module, recorder.target_class)], recorder.index


class RouterLoss:
    """The load-balancing loss of `model`, from what its routers say in a forward pass.

        with loss.recording():  logprobs = …        hooks on the routers keep their logits
        loss.value()                                the model family's own `load_balancing_loss_func`

    Of E experts, f_e the share of the tokens' choices that went to e and p_e the mean probability that it got, over all
    layers (Switch Transformers, Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6):

        ℓ = E · Σ_e f_e · p_e

    All tokens of the pass count, as they were computed: prompts too, stems that rows share once. Raises UsageError where
    the family has no routers, or no such loss.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        routers, self._index = _routers(model)
        family = sys.modules[type(model).__module__]
        self._loss: Callable[..., Tensor] | None = getattr(family, "load_balancing_loss_func", None)
        if not routers or self._loss is None or not hasattr(model, "num_experts_per_tok"):
            raise UsageError(
                f"trainer.loss.router_aux would have no effect: a {model.config.model_type} model balances no experts",
                "leave it out, or train a mixture of experts",
            )
        self._experts, self._chosen = int(model.num_experts), int(model.num_experts_per_tok)
        self._recording = False
        self._logits: list[Tensor] = []
        for router in routers:
            router.register_forward_hook(self._keep)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the routers say meanwhile, with its gradient. Not beyond: backward may compute a layer again."""
        self._logits = []
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def value(self, part: ContextSlice | None = None) -> Tensor:
        """Scalar, of the passes recorded last. They are forgotten.

        `part`: of the row that was passed, where other ranks computed its other tokens: all get the loss of all tokens.
        """
        assert self._loss is not None
        logits, self._logits = self._logits, []
        if part is not None:
            logits = [part.every(each) for each in logits]
        return self._loss(tuple(logits), self._experts, self._chosen)

    def _keep(self, _: nn.Module, __: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        if self._recording:
            logits = output if isinstance(output, torch.Tensor) else output[self._index]
            self._logits.append(logits.flatten(0, -2))


class RoutingReplay:
    """Has the layers of `model` choose the experts that the engine chose, and weigh them by their own router.

        row with experts ──► router's logits ──► softmax at the given experts (, divided by their sum) ──► experts
                                 └── gradients: through the weights, as ever; which experts is no function of the weights

    Engine and trainer compute a router's logits by other kernels, perhaps in another precision or of another version: where
    two experts are nearly tied they choose otherwise, and the token is another function altogether. (Rollout routing
    replay: Ma et al. 2025, arXiv:2510.11370.)

    A router's output is (logits, weights, indices). Hooks read what the newest pass was given until the next one begins: a
    backward pass may compute a layer again. Raises UsageError where the model has no routers. Whether it weighs experts in
    a way that is known is seen in a trial.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        routers, _ = _routers(model)
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
            used = torch.where(wanted >= 0, wanted, chosen)
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
