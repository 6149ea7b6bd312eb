"""Who tells a tracker what goes on in a step, and of which part the tensors are that a step leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from services.policies.training.layout import Layout
from trainer.memory.tracker import Tracker
from trainer.model.forward import layers_of
from trainer.parallel.expert import dispatching
from trainer.planning.timeline import BACKWARD, FORWARD, HEAD


class Watch:
    """`known`: the parts of storages that are known one by one, by their numbers."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.known: dict[int, str] = {}

    def begins(self, where: str) -> None:
        """From now on this goes on."""
        self._tracker.where = where

    def holds(self, part: str, tensors: Iterable[Tensor]) -> None:
        """`tensors`, which are there, are of this part."""
        self.known |= dict.fromkeys(self._tracker.add(tensors), part)

    def sends_evenly(self, model: PreTrainedModel, layout: Layout) -> None:
        """From now on each rank that splits the experts of `model` is sent as many tokens as the others: fake tokens choose
        none. Before they are cut."""
        if layout.expert == 1:
            return

        def sends(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            tokens, chosen, *_weights = arguments
            # Of tensor ranks, which have the same tokens, each sends its part.
            pairs = -(-len(tokens) // layout.tensor) * chosen.shape[-1]
            ends = [pairs * number // layout.expert for number in range(layout.expert + 1)]
            self._tracker.reads([end - begin for begin, end in pairwise(ends)])

        def sent(*_: object) -> None:
            self._tracker.reads(None)

        for experts in dispatching(model):
            experts.register_forward_pre_hook(sends)
            # Also where a layer that is computed once more ends early, by an exception.
            experts.register_forward_hook(sent, always_call=True)

    @contextmanager
    def following(self, model: PreTrainedModel, whose: str = "") -> Iterator[None]:
        """What goes on in `model` is known meanwhile, by hooks on its layers and on the gradients of what they make.

        forward, layer 1 … L ─► head ─► backward, layer L … 1          `whose`: the words begin with it
        """
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        backward = False

        def goes(words: str) -> Callable[..., None]:
            def on(*_: object) -> None:
                nonlocal backward
                backward = words.startswith(BACKWARD)
                self.begins(f"{whose}{words}")

            return on

        def enters(number: int) -> Callable[..., None]:
            def on(*_: object) -> None:
                # A layer that is computed once more is part of the backward pass.
                if not backward:
                    self.begins(f"{whose}{FORWARD}, layer {number} of {len(layers)}")

            return on

        def leaves(words: str) -> Callable[..., None]:
            def on(_: nn.Module, __: object, output: object) -> None:
                made = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
                if not backward and isinstance(made, Tensor) and made.requires_grad:
                    made.register_hook(goes(words))  # type: ignore[no-untyped-call]

            return on

        base = layers_of(model)
        handles = [
            base.register_forward_pre_hook(goes(f"{FORWARD}, embedding")),
            base.register_forward_hook(goes(HEAD)),
            base.register_forward_hook(leaves(f"{BACKWARD}, last norm")),
        ]
        for number, layer in enumerate(layers, start=1):
            handles.append(layer.register_forward_pre_hook(enters(number)))
            handles.append(layer.register_forward_hook(leaves(f"{BACKWARD}, layer {number} of {len(layers)}")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
