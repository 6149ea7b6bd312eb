"""Folders of other families in the torch engine: their weights are replaced under the names that the folder has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout_server.engines.torch.core import ModelWeights, load_decoder
from services.wire.errors import UsageError
from tests.support.model_families import make_family
from tests.unit.rollout_server.test_engine_llama import CPU, decoded

DECODED = ("Mistral", "Gemma 3", "Qwen3-MoE", "Mixtral")


@pytest.mark.parametrize("family", DECODED)
def test_weights_are_replaced_under_the_names_of_the_folder(family: str, tmp_path: Path) -> None:
    make_family(family).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    assert decoder.ends == (1,)
    weights, before = ModelWeights(decoder), decoded(decoder)
    assert {name: tensor.shape for name, tensor in weights.shadow().items()} == {
        name: tensor.shape for name, tensor in stored.items()
    }
    assert all(torch.equal(weights.live()[name], tensor) for name, tensor in stored.items())
    with torch.no_grad():
        for tensor in weights.shadow().values():
            tensor.mul_(0.5)
    assert torch.equal(decoded(decoder), before), "what is staged is not served"
    weights.flip()
    assert all(torch.equal(weights.live()[name], tensor * 0.5) for name, tensor in stored.items())
    assert not torch.allclose(decoded(decoder), before)
    weights.flip()
    assert torch.equal(decoded(decoder), before)


def test_attention_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    make_family("gpt-oss").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"the attention of a gpt_oss model is not scaled_dot_product_attention"):
        load_decoder(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize("family", ["Qwen3-Next", "Llama 4, text"])
def test_layers_without_a_plain_cache_are_refused_by_name(family: str, tmp_path: Path) -> None:
    make_family(family).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"layers of kind (linear|chunked)_attention"):
        load_decoder(tmp_path, torch.float32, CPU)
