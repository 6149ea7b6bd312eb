"""The load-balancing loss of a mixture of experts, from what its routers say in a forward pass.

    with loss.recording():  logprobs = …        hooks on the routers keep their logits
    loss.value()                                the model family's own `load_balancing_loss_func`

Of E experts, f_e the share of the tokens' choices that went to e and p_e the mean probability that it got, over all layers
(Switch Transformers, Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6):

    ℓ = E · Σ_e f_e · p_e

All tokens of the pass count, as they were computed: prompts too, stems that rows share once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from services.wire.errors import UsageError
from trainer.parallel.ulysses import ContextSlice


class RouterLoss:
    """Of `model`. Raises UsageError where its family has no routers, or no such loss."""

    def __init__(self, model: PreTrainedModel) -> None:
        recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
        family = sys.modules[type(model).__module__]
        self._loss: Callable[..., Tensor] | None = getattr(family, "load_balancing_loss_func", None)
        if not isinstance(recorder, OutputRecorder) or self._loss is None or not hasattr(model, "num_experts_per_tok"):
            raise UsageError(
                f"trainer.loss.router_aux would have no effect: a {model.config.model_type} model balances no experts",
                "leave it out, or train a mixture of experts",
            )
        self._experts, self._chosen = int(model.num_experts), int(model.num_experts_per_tok)
        self._index = recorder.index
        self._recording = False
        self._logits: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, recorder.target_class):
                module.register_forward_hook(self._keep)

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
