"""Logprobs of prompts in the torch engine: those of a plain forward, in however many pieces, whatever is cached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_server.engines.base import GenerationDelta, GenerationRequest, PromptLogprobs, RequestFailed
from rollout_server.engines.torch import prompt_scores
from rollout_server.engines.torch.core import load_decoder
from rollout_server.engines.torch.decoder import Decoder
from rollout_server.engines.torch.forward import PolicyForward
from rollout_server.engines.torch.kv_cache import KvCache
from rollout_server.engines.torch.llama import LlamaDecoder, read_llama
from rollout_server.engines.torch.prefill import Newcomer, Prefill, PrefixCache, as_tokens
from rollout_server.engines.torch.prompt_scores import piece_width, prefill_scored
from rollout_server.engines.torch.scheduler import Scheduler
from rollout_server.engines.torch.transformers_decoder import TransformersDecoder
from services.wire.sampling import SamplingParams
from tests.support.model_families import make_family
from tests.unit.rollout_server.test_engine_prefill import CPU, batch_of, tokens
from trainer.sft.tiny_model import build_model, save_policy

GAP = 1e-4
ONE = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Any:
    model = build_model(5).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(2.0)
    return model


@pytest.fixture(scope="module", params=["llama", "transformers"])
def forward(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> PolicyForward:
    """Over the engine's own decoder, and over transformers' code."""
    if request.param == "transformers":
        return PolicyForward(TransformersDecoder(model))
    folder = tmp_path_factory.mktemp("llama") / "model"
    save_policy(model, folder)
    decoder = read_llama(folder, torch.float32, CPU)
    assert isinstance(decoder, LlamaDecoder)
    return PolicyForward(decoder)


def plain(model: Any, prompt: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' own float32 logprobs of all tokens but the first, and their ranks."""
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0, :-1].float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(list(prompt[1:]), dtype=torch.int64).unsqueeze(1))
    return own.squeeze(1), (logprobs >= own).sum(1)


def check(model: Any, prompt: Sequence[int], scores: PromptLogprobs | None) -> None:
    assert scores is not None
    expected, ranks = plain(model, prompt)
    assert len(scores.logprobs) == len(scores.ranks) == len(prompt) - 1
    if len(prompt) > 1:
        assert float((torch.tensor(scores.logprobs) - expected).abs().max()) <= GAP
        assert scores.ranks == ranks.tolist()


def slots_for(forward: PolicyForward) -> KvCache:
    return KvCache(forward.shape, max_rows=32, dtype=torch.float32, device=CPU)


@torch.inference_mode()
@pytest.mark.parametrize("piece", [1, 7, 16, 1000])
def test_pieces_of_any_width_give_a_plain_forwards_logprobs(forward: PolicyForward, model: Any, piece: int) -> None:
    prompts = [tokens(length, length) for length in (40, 1, 2, 33)]
    lengths, width = [len(prompt) for prompt in prompts], 40
    window = slots_for(forward).scratch(lengths)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    last, scores = prefill_scored(forward, ids, window, lengths, piece)
    for row, prompt in enumerate(prompts):
        check(model, prompt, scores[row])
        with torch.no_grad():
            after = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        assert float((last[row] - after).abs().max()) <= GAP


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("outputs", [64, 49_152, 151_936])
def test_the_logits_of_a_piece_are_bounded(rows: int, outputs: int) -> None:
    piece = piece_width(rows, outputs, 16_384)
    assert piece >= 1
    assert rows * piece * outputs <= prompt_scores.MOST_LOGITS
    assert rows * piece <= 16_384


@torch.inference_mode()
def test_long_prompts_are_read_in_pieces(forward: PolicyForward, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "MOST_LOGITS", 64 * 50)
    widths: list[int] = []
    whole = forward.logits_of_all

    def seen(ids: torch.Tensor, window: Any) -> torch.Tensor:
        widths.append(ids.numel())
        return whole(ids, window)

    monkeypatch.setattr(forward, "logits_of_all", seen)
    prompt = tokens(180, 1)
    prefilled = Prefill(forward, slots_for(forward), CPU).start([Newcomer(as_tokens(prompt), None, 1, True)])
    check(model, prompt, prefilled.scores[0])
    assert widths == [50, 50, 50, 30]


@torch.inference_mode()
def test_a_cached_prefix_is_not_read_but_what_was_scored_is_cached(forward: PolicyForward, model: Any) -> None:
    prefill = Prefill(forward, slots_for(forward), CPU, PrefixCache())
    prompt = tokens(90, 3)
    prefill.start([Newcomer(as_tokens(prompt), None, 1)])
    for asked in (prompt, [*prompt, 5, 6], prompt[:50]):
        before = prefill.computed
        check(model, asked, prefill.start([Newcomer(as_tokens(asked), None, 1, True)]).scores[0])
        assert prefill.computed - before == len(asked)
    other = tokens(70, 4)
    prefill.start([Newcomer(as_tokens(other), None, 1, True)])
    before = prefill.computed
    prefill.start([Newcomer(as_tokens([*other, 9]), None, 1)])
    assert prefill.computed - before == 1


def answers_of(batch: Scheduler) -> dict[str, GenerationDelta]:
    return {one.request_id: one for one in batch.take_outbox() if isinstance(one, GenerationDelta)}


@torch.inference_mode()
@pytest.mark.parametrize("policy", ["keep", "salt", "recompute"])
def test_prompts_are_scored_beside_others_that_are_not(forward: PolicyForward, model: Any, policy: Any) -> None:
    batch = batch_of(forward, policy)
    prompt, other = tokens(80, 8), tokens(9, 9)
    batch.add(GenerationRequest("running", tokens(5, 1), SamplingParams(max_tokens=9), stream=True))
    batch.step(0, admit=True)
    for name, ids, scored in (
        ("plain", prompt, False),
        ("scored", prompt, True),
        ("again", prompt, True),
        ("other", other, True),
        ("longer", [*prompt, 4], True),
    ):
        batch.add(GenerationRequest(name, ids, ONE, prompt_logprobs=scored))
    batch.take_outbox()
    batch.step(0, admit=True)
    found = answers_of(batch)
    assert found["plain"].prompt_logprobs is None and found["running"].prompt_logprobs is None
    assert len({tuple(found[name].token_ids) for name in ("plain", "scored", "again")}) == 1
    for name, ids in (("scored", prompt), ("again", prompt), ("other", other), ("longer", [*prompt, 4])):
        check(model, ids, found[name].prompt_logprobs)


@torch.inference_mode()
def test_they_come_once_with_the_first_delta_of_a_stream(forward: PolicyForward, model: Any) -> None:
    batch = batch_of(forward, "keep")
    prompt = tokens(20, 2)
    batch.add(GenerationRequest("r", prompt, SamplingParams(max_tokens=4), stream=True, prompt_logprobs=True))
    for _ in range(4):
        batch.step(0, admit=True)
    first, *later = [one for one in batch.take_outbox() if isinstance(one, GenerationDelta)]
    check(model, prompt, first.prompt_logprobs)
    assert later and all(delta.prompt_logprobs is None for delta in later)


class Broken(PolicyForward):
    """Gives no number at one place of every prompt."""

    def logits_of_all(self, ids: torch.Tensor, window: Any) -> torch.Tensor:
        logits = super().logits_of_all(ids, window)
        logits[:, 1] = math.nan
        return logits


@torch.inference_mode()
def test_what_is_no_number_ends_the_request_with_an_error(model: Any) -> None:
    batch = batch_of(Broken(model), "keep")
    batch.add(GenerationRequest("r", tokens(9, 2), ONE, prompt_logprobs=True))
    batch.step(3, admit=True)
    (failed,) = batch.take_outbox()
    assert isinstance(failed, RequestFailed)
    assert "version 3 gives logits that are not finite" in failed.error.what
    batch.add(GenerationRequest("later", tokens(9, 2), ONE))
    batch.step(3, admit=True)
    assert answers_of(batch)["later"].finish_reason == "length"


@torch.inference_mode()
@pytest.mark.parametrize("family", ["Mistral", "Gemma 3", "Qwen3-MoE"])
def test_other_families_are_scored_as_transformers_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of attention, scaled or capped logits: all that a family's own forward does."""
    theirs = make_family(family)
    theirs.save_pretrained(tmp_path)
    decoder: Decoder = load_decoder(tmp_path, torch.float32, CPU)
    monkeypatch.setattr(prompt_scores, "MOST_LOGITS", decoder.outputs * 13)
    forward, prompt = PolicyForward(decoder), tokens(60, 6)
    prefilled = Prefill(forward, slots_for(forward), CPU).start([Newcomer(as_tokens(prompt), None, 1, True)])
    check(theirs.eval(), prompt, prefilled.scores[0])
