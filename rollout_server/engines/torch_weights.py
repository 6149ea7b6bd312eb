"""Two sets of a model's weights: the live one that decodes, the shadow one that a new version is staged into.

    live     p.data ──► storage A ╲╱ storage B        flip: each parameter changes its storage, nothing is copied
    shadow              storage B ╱╲ storage A

Tied weights are one parameter with several names: one storage, one flip, named once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel


class ModelWeights:
    """A `weight_bus.receiver.WeightTarget` over a model's parameters, by Hugging Face name."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = dict(model.named_parameters())
        self._live = {name: parameter.data for name, parameter in self._parameters.items()}
        # A copy, so that its pages are there before the first version is staged.
        self._shadow = {name: tensor.clone() for name, tensor in self._live.items()}

    def live(self) -> Mapping[str, torch.Tensor]:
        """The weights being served."""
        return self._live

    def shadow(self) -> Mapping[str, torch.Tensor]:
        """Where the next version goes, with the same names, shapes and dtypes."""
        return self._shadow

    def flip(self) -> None:
        """Shadow becomes live and live becomes shadow. Call it between two steps; a second one serves the old version."""
        # The tensors must stay ordinary ones, also when the decode thread flips in its inference mode.
        with torch.inference_mode(False):
            for name, parameter in self._parameters.items():
                parameter.data = self._shadow[name]
        self._live, self._shadow = self._shadow, self._live
