"""Compilation of a model's layers (`trainer.compile`), by torch.compile.

Each layer is compiled for itself, and layers of one kind share what was compiled. Packed rows are of another length and
another layout in each pass: sizes are symbols, and attention, whose calls depend on the layout, is left out. What is
between, norms, projections and feed-forward, becomes a few kernels.

Sums are added up in another order, so bytes are others than without. Ordinary calls of the model take the same layers.
"""

from __future__ import annotations

import shutil

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from services.wire.errors import UsageError
from trainer.model import packed_attention

_COMPILERS = ("c++", "g++", "clang++")


def compile_layers(model: PreTrainedModel) -> None:
    """To be called once it is known how packed rows are kept apart. The first passes take the time to compile, a minute.

    Raises UsageError for an architecture without layers that are known as such, and without a C++ compiler on a CPU.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(f"{model.config.model_type} models have no layers to compile", "set trainer.compile=false")
    if model.device.type == "cpu" and not any(map(shutil.which, _COMPILERS)):
        raise UsageError("trainer.compile needs a C++ compiler, and there is none", "install g++, or set it to false")
    packed_attention.register(compiled=True)
    for layer in layers:
        layer.compile(dynamic=True)
