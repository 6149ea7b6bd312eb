"""The chunked language head: exact in float64, the same whatever the chunks, and the model's own logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from tests.support.trajectories import grouped, random_trajectories
from trainer.data.packing import KeptTokens, pack
from trainer.data.rows import rows_of
from trainer.memory.tracker import Tracker
from trainer.model.forward import PackedForward
from trainer.model.head import head_terms
from trainer.model.logprobs import sampled_terms
from trainer.sft.tiny_model import build_model

ROWS, WIDTH, VOCABULARY = 7, 5, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias, tokens, temperatures."""
    torch.manual_seed(0)
    shapes = ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    hidden, weight, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return hidden, weight, bias, torch.randint(0, VOCABULARY, (ROWS,)), torch.rand(ROWS, dtype=dtype) + 0.5


@pytest.mark.parametrize("chunk", [2 * VOCABULARY, 1000], ids=["chunks", "kept"])
@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_gradients_are_those_of_the_formula(chunk: int, top: int, entropy: bool, warm: bool) -> None:
    hidden, weight, bias, tokens, temperature = inputs()

    def said(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        terms = head_terms(
            hidden,
            weight,
            tokens,
            temperature if warm else None,
            bias=bias,
            entropy=entropy,
            top=top,
            chunk=chunk,
        )
        return tuple(each for each in (terms.logprobs, terms.entropy, terms.top_logprobs) if each is not None)

    assert torch.autograd.gradcheck(said, (hidden, weight, bias))


def test_values_are_those_of_log_softmax() -> None:
    hidden, weight, bias, tokens, temperature = inputs()
    every = torch.log_softmax((hidden @ weight.T + bias) / temperature[:, None], -1)
    for chunk in (1, 3 * VOCABULARY, 1000):
        found = head_terms(hidden, weight, tokens, temperature, bias=bias, entropy=True, top=2, chunk=chunk)
        assert found.entropy is not None and found.top_ids is not None and found.top_logprobs is not None
        torch.testing.assert_close(found.logprobs, every.gather(1, tokens[:, None])[:, 0])
        torch.testing.assert_close(found.entropy, -(every.exp() * every).sum(-1))
        likeliest = every.topk(2)
        assert torch.equal(found.top_ids, likeliest.indices)
        torch.testing.assert_close(found.top_logprobs, likeliest.values)


def some_kept(tokens: Tensor) -> KeptTokens:
    """Each token with the one or two behind it; every third row was sampled from all there are."""
    ids = [
        [] if row % 3 == 2 else [(token + more) % VOCABULARY for more in range(2 + row % 2)]
        for row, token in enumerate(tokens.tolist())
    ]
    counts = torch.tensor([len(each) for each in ids])
    return KeptTokens(counts, torch.tensor([each for some in ids for each in some]))


@pytest.mark.parametrize("chunk", [2 * VOCABULARY, 1000], ids=["chunks", "kept"])
def test_what_was_cut_has_no_chance_and_no_gradient(chunk: int) -> None:
    hidden, weight, bias, tokens, temperature = inputs()
    kept = some_kept(tokens)
    gone = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
    begin = 0
    for row, count in enumerate(kept.counts.tolist()):
        if count:
            gone[row] = True
            gone[row, kept.ids[begin : begin + count]] = False
        begin += count

    def said(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        terms = head_terms(hidden, weight, tokens, temperature, kept=kept, bias=bias, entropy=True, chunk=chunk)
        assert terms.entropy is not None
        return terms.logprobs, terms.entropy

    logits = ((hidden @ weight.T + bias) / temperature[:, None]).masked_fill(gone, -torch.inf)
    every = torch.log_softmax(logits, -1)
    logprobs, entropy = said(hidden, weight, bias)
    torch.testing.assert_close(logprobs, every.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(every.exp() * every.masked_fill(gone, 0.0)).sum(-1))
    assert torch.autograd.gradcheck(said, (hidden, weight, bias))
    chosen = torch.tensor([5, 0, 1])
    taken = kept.take(chosen)
    assert taken.counts.tolist() == kept.counts[chosen].tolist()
    places = [int(kept.counts[:row].sum()) + each for row in chosen.tolist() for each in range(int(kept.counts[row]))]
    assert taken.ids.tolist() == kept.ids[places].tolist()


def test_a_pass_in_16_bits_sums_in_float32() -> None:
    hidden, weight, bias, tokens, _ = inputs(torch.float32)
    found = head_terms(hidden.bfloat16(), weight, tokens, bias=bias, chunk=2 * VOCABULARY)
    assert found.logprobs.dtype == torch.float32
    found.logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    mine = weight.grad.clone()
    weight.grad = None
    head_terms(hidden, weight, tokens, bias=bias).logprobs.sum().backward()
    torch.testing.assert_close(mine, weight.grad, rtol=0.02, atol=0.02)


def test_a_pass_in_16_bits_has_no_gradient_of_the_weight_in_16_bits() -> None:
    hidden, weight, _, tokens, _ = inputs(torch.float32)
    terms = head_terms(hidden.bfloat16(), weight, tokens, chunk=2 * VOCABULARY)
    with Tracker() as tracker:
        terms.logprobs.sum().backward()
    # The weight itself, which hidden states' gradients are made with: once, and not beside the weight's in each chunk.
    assert [event.nbytes for event in tracker.events].count(2 * weight.numel()) == 1


@pytest.mark.parametrize("kind", ["linear", "softcapped", "scaled"])
def test_terms_are_those_of_the_model_s_own_logits(kind: str) -> None:
    small = {
        "vocab_size": 60,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    torch.manual_seed(1)
    model = {
        "linear": lambda: build_model(1, hidden_size=32, layers=1),
        "softcapped": lambda: Gemma2ForCausalLM(Gemma2Config(**small, final_logit_softcapping=0.05)),
        "scaled": lambda: GraniteForCausalLM(GraniteConfig(**small, logits_scaling=4.0)),
    }[kind]().eval()
    rows, tally = rows_of(grouped(random_trajectories(1, groups=2, size=3)), 1, 2)
    (micro,) = pack(rows, tally, 4096).micro_batches
    policy = PackedForward(model)
    found, entropy = sampled_terms(policy, micro, entropy=True)
    every = policy.logits(micro.row, micro.places - 1).log_softmax(-1)
    tokens = micro.row.input_ids[0, micro.places]
    torch.testing.assert_close(found, every.gather(1, tokens[:, None])[:, 0], rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy, -(every.exp() * every).sum(-1), rtol=0, atol=2e-5)
