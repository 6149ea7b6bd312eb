"""Memory of activations: which layers keep theirs for the backward pass, and which compute them once more.

none         every layer keeps what it computed
selective    every second layer keeps its input alone
full         every layer keeps its input alone; with offload, on a GPU, that is in the host's memory

The means are `transformers`' own, which only act in training mode. The layers are put into it, and no module within them:
there dropout stays off, as the ratio to the engine's policy needs it.
"""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from services.wire.errors import UsageError

Checkpointing = Literal["none", "selective", "full"]
_EVERY = {"selective": 2, "full": 1}


def recompute_activations(model: PreTrainedModel, which: Checkpointing, *, offload: bool = False) -> None:
    """To be called when `model` is in evaluation mode. Gradients stay the same, bit for bit.

    Raises UsageError for an architecture without such layers, for one with dropout in them, and for an offload without an
    effect.
    """
    if which == "none":
        if offload:
            raise UsageError(
                "trainer.activation_offload offloads what checkpointed layers keep, and none is checkpointed",
                "set trainer.activation_checkpointing=full",
            )
        return
    if offload and model.device.type == "cpu":
        raise UsageError("trainer.activation_offload without a GPU has no effect", "leave it out")
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    kind = model.config.model_type
    if not layers:
        raise UsageError(f"{kind} models have no layers to checkpoint", "set trainer.activation_checkpointing=none")
    text = model.config.get_text_config()
    dropped = [name for name, value in text.to_dict().items() if "drop" in name and isinstance(value, float) and value]
    if dropped:
        raise UsageError(
            f"the model has dropout ({', '.join(dropped)}), which would be on in checkpointed layers",
            "set it to 0 in its config.json",
        )
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "preserve_rng_state": False}, every_n_layers=_EVERY[which], offload=offload
    )
    for layer in layers:
        layer.training = True
