"""Activation checkpointing: layers are seen to be recomputed, gradients are the same bits, and dropout stays off."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from services.config.settings import TrainerSettings
from services.wire.errors import UsageError
from tests.support.trajectories import grouped, random_trajectories
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.memory.activations import Checkpointing, recompute_activations
from trainer.model.learner import Learner

LAYERS = 4


def a_model(dropout: float = 0.0) -> PreTrainedModel:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config).eval()


def gradients(which: Checkpointing) -> tuple[dict[str, Tensor], list[int]]:
    """Those of one batch, and how often each layer was computed."""
    learner = Learner(a_model(), TrainerSettings(activation_checkpointing=which))
    computed = [0] * LAYERS

    def count(layer: int) -> None:
        computed[layer] += 1

    for number, layer in enumerate(learner.model.base_model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: count(number))
    rows, tally = rows_of(grouped(random_trajectories(1, groups=3, size=3)), 1, 2)
    batch = pack(rows, tally, 64)
    learner.gradient(batch, learner.proximals([batch])[0])
    found = {name: parameter.grad for name, parameter in learner.model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}, computed


def test_checkpointed_layers_are_recomputed_and_give_the_same_gradients() -> None:
    plain, once = gradients("none")
    passes = once[0]
    assert once == [passes] * LAYERS
    for which, wanted in (("selective", [2, 1, 2, 1]), ("full", [2] * LAYERS)):
        found, computed = gradients(which)  # type: ignore[arg-type]
        assert computed == [passes * times for times in wanted]
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_no_module_with_dropout_is_put_into_training_mode() -> None:
    model = a_model()
    recompute_activations(model, "full")
    assert not any(module.training for module in model.modules() if isinstance(module, nn.Linear | nn.Dropout))
    with pytest.raises(UsageError, match="attention_dropout"):
        recompute_activations(a_model(dropout=0.1), "full")


def test_an_offload_without_an_effect_is_refused() -> None:
    with pytest.raises(UsageError, match="none is checkpointed"):
        recompute_activations(a_model(), "none", offload=True)
    with pytest.raises(UsageError, match="without a GPU"):
        recompute_activations(a_model(), "full", offload=True)
