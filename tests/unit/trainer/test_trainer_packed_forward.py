"""Rows laid end to end give what each gives alone, logits and gradients, however the model keeps them apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from trainer.data.packing import PackedRow, lay_end_to_end
from trainer.model.forward import PackedForward, Separation
from trainer.sft.tiny_model import build_model

VOCABULARY = 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}

MODELS: dict[str, tuple[Callable[[], PreTrainedModel], Separation]] = {
    "qwen3": (lambda: build_model(seed=3), "within"),
    "llama, grouped keys": (lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), "within"),
    "gpt2, learned positions": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
        "within",
    ),
    "mistral, a window": (lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=6)), "within"),
    "gemma2, capped scores": (
        lambda: Gemma2ForCausalLM(Gemma2Config(**LLAMA, head_dim=8, sliding_window=6)),
        "masked",
    ),
    "falcon, alibi": (lambda: FalconForCausalLM(FalconConfig(**SIZES, alibi=True)), "apart"),
    "mamba, a recurrence": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)),
        "apart",
    ),
}


def a_model(name: str) -> PreTrainedModel:
    """Freshly initialised, with weights large enough for tokens to matter to each other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name][0]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.ndim > 1 else 1.0)
    return model


def some_rows(*lengths: int) -> PackedRow:
    numbers = np.random.default_rng(7)
    return lay_end_to_end([numbers.integers(1, VOCABULARY, length).astype(np.int32) for length in lengths])


def alone(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """The logits of each row in a pass of its own, `[T, V]`."""
    pieces = row.input_ids.split(row.starts.diff().tolist(), dim=1)
    return torch.cat([model(input_ids=piece, use_cache=False).logits[0] for piece in pieces])


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_give_what_each_gives_alone(name: str) -> None:
    model = a_model(name)
    reference = copy.deepcopy(model)
    row = some_rows(1, 2, 5, 9, 9, 9, 17)
    packed = PackedForward(model)
    assert packed.separation == MODELS[name][1]
    places = torch.tensor([0, 2, 7, 8, 30, 51])
    wanted, found = alone(reference, row)[places], packed.logits(row, places)
    close(found, wanted)
    weighing = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (wanted * weighing).sum().backward()
    (found * weighing).sum().backward()
    largest = max(float(weight.grad.abs().max()) for weight in reference.parameters() if weight.grad is not None)
    for weight, of_reference in zip(model.parameters(), reference.parameters(), strict=True):
        if of_reference.grad is not None:
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad, of_reference.grad, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_those_that_the_head_sees(name: str) -> None:
    """A model with a head on top and its bare layers agree, and a token of another row changes neither."""
    model = a_model(name)
    first, second = some_rows(4, 6), some_rows(4, 6)
    second.input_ids[0, :4] = 1 + second.input_ids[0, :4] % (VOCABULARY - 1)
    places = torch.arange(4, 10)
    with torch.no_grad():
        found = [PackedForward(of).hidden(row, places) for of in (model, model.base_model) for row in (first, second)]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("name", ["qwen3", "gpt2, learned positions", "mistral, a window"])
def test_ordinary_calls_are_answered_as_before(name: str, tmp_path: Path) -> None:
    """Also with padding on the left, with a cache, and once saved."""
    model = a_model(name)
    before = copy.deepcopy(model)
    PackedForward(model)
    ids = some_rows(9).input_ids
    padded, mask = torch.cat([torch.zeros_like(ids[:, :3]), ids], 1), torch.ones(1, 12, dtype=torch.int64)
    mask[:, :3] = 0
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before(input_ids=ids).logits)
        masked = [each(input_ids=padded, attention_mask=mask).logits[:, 3:] for each in (model, before)]
    assert torch.equal(*masked)
    sampled = [
        each.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for each in (model, before)
    ]
    assert torch.equal(*sampled)
    for folder, each in (("after", model), ("before", before)):
        each.save_pretrained(tmp_path / folder)
    assert (tmp_path / "after" / "config.json").read_text() == (tmp_path / "before" / "config.json").read_text()


def test_one_run_of_equal_rows_gives_the_bytes_of_a_batch() -> None:
    """Not only near: a row's attention is computed by the same kernel, in the same shape."""
    model = build_model(seed=3)
    row = some_rows(8, 8, 8)
    batch = model(input_ids=row.input_ids.view(3, 8), use_cache=False).logits.flatten(0, 1)
    assert torch.equal(PackedForward(model).logits(row, torch.arange(24)), batch)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_no_row_and_an_empty_one_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        lay_end_to_end([np.zeros(length, dtype=np.int32) for length in lengths])
