"""What only the torch engine promises: architectures, tied weights, and how it fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rollout_server.engines.base import EngineCrashedError, GenerationRequest, NonFiniteLogitsError, collect
from rollout_server.engines.factory import make_engine
from rollout_server.engines.torch.core import EngineCore
from rollout_server.engines.torch.engine import CoreSettings, TorchEngine
from rollout_server.engines.torch.forward import PolicyForward, RecordingError, record
from services.config.settings import RunSettings
from services.wire.errors import NotReadyError, UsageError
from services.wire.sampling import SamplingParams
from weight_bus.manifest.manifest import encode_manifest
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.select import make_exporter

SMALL: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": [3, 4],
    "pad_token_id": 0,
}


def core_settings(folder: Path, *, max_running: int = 8, run_id: str = "unit") -> CoreSettings:
    return CoreSettings(
        model=str(folder),
        run_id=run_id,
        dtype="float32",
        max_running=max_running,
        threads=1,
        transport="shm",
        seed=0,
    )


@asynccontextmanager
async def serving(folder: Path, *, max_running: int = 8, run_id: str = "unit") -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(EngineCore(core_settings(folder, max_running=max_running, run_id=run_id)))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def asked(name: str, prompt: list[int], max_tokens: int, n: int = 1, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **sampling), n)


def model_of(config: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by plain forwards over the whole sequence."""
    sequence = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits
        sequence.append(int(logits[0, -1].argmax()))
    return sequence[len(prompt) :]


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SMALL),
        transformers.MistralConfig(**SMALL, sliding_window=5),
        transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=5),
        transformers.GPT2Config(vocab_size=80, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=3),
        transformers.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ],
    ids=lambda config: config.model_type,
)
async def test_other_architectures_decode_exactly(config: Any, tmp_path: Path) -> None:
    model = model_of(config)
    model.save_pretrained(tmp_path)
    prompts = [[5, 9, 11, 20, 31, 7, 8, 60], [42], [17, 18, 19]]
    async with serving(tmp_path) as engine:
        requests = [
            asked(str(number), prompt, 14, temperature=0.0, ignore_eos=True) for number, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*(collect(engine.generate(request)) for request in requests))
    for prompt, (sample,) in zip(prompts, answers, strict=True):
        assert sample.token_ids == greedy(model, prompt, 14)


def test_a_model_without_a_plain_cache_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=80, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(UsageError, match="mamba model does not cache keys and values"):
        PolicyForward(transformers.AutoModelForCausalLM.from_config(config).eval())


def test_a_model_that_cannot_be_recorded_decodes_as_it_is(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RecordingError("it looks at values")

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_policy).eval()
    monkeypatch.setattr("rollout_server.engines.torch.forward.record", refuse)
    # Made, it has decoded and been compared with the plain model.
    assert not PolicyForward(model).recorded


def test_code_that_looks_at_values_is_not_recorded() -> None:
    def double_if_positive(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool(x.sum() > 0) else x

    with pytest.raises(RecordingError, match="depends on a value"):
        record(double_if_positive, (torch.ones(3),))


def test_a_model_whose_embedding_has_a_padding_row_is_recorded() -> None:
    config = transformers.OPTConfig(
        vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32
    )
    assert PolicyForward(transformers.AutoModelForCausalLM.from_config(config).eval()).recorded


def test_the_main_model_is_recorded(tiny_policy: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_policy).eval()
    assert PolicyForward(model).recorded


async def test_tied_weights_flip_together(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)
    old, new = model_of(config, 0), model_of(config, 1)
    old.save_pretrained(tmp_path / "model")
    weights = dict(new.named_parameters())
    assert "lm_head.weight" not in weights
    publisher = Publisher("unit", weights, "float32", make_exporter("shm", "unit"), 1 << 14)
    try:
        manifest = publisher.publish(3, weights).manifest()
        async with serving(tmp_path / "model") as engine:
            before = await engine.weights_digest()
            await engine.stage(encode_manifest(manifest))
            await engine.commit(3)
            (sample,) = await collect(engine.generate(asked("a", [5, 6, 7], 12, temperature=0.0, ignore_eos=True)))
            assert before != manifest.root_digest
            assert await engine.weights_digest() == manifest.root_digest
    finally:
        publisher.close()
    assert sample.token_ids == greedy(new, [5, 6, 7], 12)


async def test_several_end_tokens_are_known(tmp_path: Path) -> None:
    model_of(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    async with serving(tmp_path) as engine:
        assert engine.eos_token_ids == (3, 4)
        request = asked("a", [5, 6], 60, n=32, temperature=2.0, presence_penalty=2.0, frequency_penalty=2.0)
        samples = await collect(engine.generate(request))
    ends = {sample.token_ids[-1] for sample in samples if sample.finish_reason == "stop"}
    assert ends == {3, 4}
    assert not any(token in (3, 4) for sample in samples for token in sample.token_ids[:-1])


async def test_weights_that_are_not_finite_end_requests_and_the_next_version_serves(tmp_path: Path) -> None:
    model = model_of(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(tmp_path)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    publisher = Publisher("unit", weights, "float32", make_exporter("shm", "unit"), 1 << 20)
    try:
        async with serving(tmp_path) as engine:
            broken = dict(weights)
            name = "model.layers.0.self_attn.k_proj.weight"
            broken[name] = torch.full_like(weights[name], float("nan"))
            await engine.stage(encode_manifest(publisher.publish(1, broken).manifest()))
            await engine.commit(1)
            with pytest.raises(NonFiniteLogitsError, match="policy version 1"):
                await collect(engine.generate(asked("a", [5] * 30, 8, n=4)))
            await engine.stage(encode_manifest(publisher.publish(2, weights).manifest()))
            await engine.commit(2)
            (sample,) = await collect(engine.generate(asked("b", [5, 6], 8, temperature=0.0, ignore_eos=True)))
            assert engine.status().failure is None
    finally:
        publisher.close()
    assert sample.token_ids == greedy(model, [5, 6], 8)


async def test_a_crash_reaches_everyone_who_waits(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tiny_policy) as engine:
        running = [
            asyncio.create_task(collect(engine.generate(asked(f"r{n}", [5], 250, ignore_eos=True)))) for n in range(3)
        ]
        deltas = engine.generate(
            GenerationRequest("s", [5], SamplingParams(max_tokens=200, ignore_eos=True), stream=True)
        )
        await anext(deltas)

        def broken(*_: object, **__: object) -> int:
            raise MemoryError("no room")

        monkeypatch.setattr(engine._core._decode._batch, "step", broken)  # type: ignore[union-attr]
        with pytest.raises(EngineCrashedError, match="MemoryError: no room"):
            async for _ in deltas:
                pass
        for result in await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 10.0):
            assert isinstance(result, EngineCrashedError)
        assert "no room" in (engine.status().failure or "")
        with pytest.raises(EngineCrashedError):
            await collect(engine.generate(asked("later", [5], 4)))
        with pytest.raises(EngineCrashedError):
            await engine.commit(1)


async def test_close_ends_the_thread_and_what_waits(tiny_policy: Path) -> None:
    async with serving(tiny_policy) as engine:
        waiting = asyncio.create_task(collect(engine.generate(asked("a", [5], 250, ignore_eos=True))))
        await asyncio.sleep(0)
        assert any(thread.name == "decode" for thread in threading.enumerate())
        await engine.close()
        with pytest.raises(NotReadyError):
            await waiting
        assert not any(thread.name == "decode" for thread in threading.enumerate())
        with pytest.raises(NotReadyError):
            await collect(engine.generate(asked("b", [5], 4)))


async def test_an_engine_that_is_not_started_says_so(tmp_path: Path) -> None:
    engine = make_engine("torch", tmp_path / "nothing", "unit", RunSettings())
    with pytest.raises(NotReadyError):
        await collect(engine.generate(asked("a", [5], 4)))
    assert engine.status().failure == "not started"
    with pytest.raises(UsageError, match="holds no causal language model"):
        await engine.start()
    await engine.close()


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="known: torch, vllm"):
        make_engine("magic", tmp_path, "unit", RunSettings())  # type: ignore[arg-type]


def test_one_process_is_not_split_over_ranks(tmp_path: Path) -> None:
    settings = RunSettings.model_validate({"rollout": {"tensor_parallel": 2}})
    with pytest.raises(UsageError, match="engine torch cannot split a model over 2 ranks"):
        make_engine("torch", tmp_path, "unit", settings)


async def test_small_weights_wait_for_no_thread_while_requests_decode(tmp_path: Path) -> None:
    old, new = model_of(transformers.LlamaConfig(**SMALL)), model_of(transformers.LlamaConfig(**SMALL), 1)
    old.save_pretrained(tmp_path)
    weights = dict(new.named_parameters())
    publisher = Publisher("unit", weights, "float32", make_exporter("shm", "unit"), 1 << 20)
    end = threading.Event()
    try:
        async with serving(tmp_path) as engine:
            for version in (1, 2):  # from both arenas, which are set up on a thread
                await engine.stage(encode_manifest(publisher.publish(version, weights).manifest()))
                await engine.commit(version)
            assert engine._core._weight_threads is not None
            for _ in range(4):
                engine._core._weight_threads.submit(end.wait, 30)
            request = asyncio.create_task(collect(engine.generate(asked("a", [5, 6], 50, ignore_eos=True))))
            for version in (3, 4, 5):
                manifest = publisher.publish(version, weights).manifest()
                async with asyncio.timeout(10):
                    staged = await engine.stage(encode_manifest(manifest))
                    await engine.commit(version)
                assert (staged.root_digest, engine.policy_version) == (manifest.root_digest, version)
            end.set()
            (sample,) = await request
            assert len(sample.token_ids) == 50
            assert await engine.weights_digest() == manifest.root_digest
    finally:
        end.set()
        publisher.close()
