"""The torch engine's own decoder: the logits of transformers without it, for the folders that it can read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rollout_server.engines.torch.core import load_decoder
from rollout_server.engines.torch.decoder import Decoder
from rollout_server.engines.torch.forward import PolicyForward
from rollout_server.engines.torch.kv_cache import KvCache
from rollout_server.engines.torch.llama import LlamaDecoder, read_llama
from rollout_server.engines.torch.llama_config import read_config
from rollout_server.engines.torch.transformers_decoder import TransformersDecoder, load_transformers
from services.wire.errors import UsageError
from tests.unit.rollout_server.test_engine_torch import SMALL

CPU = torch.device("cpu")


def save_model(folder: Path, config: Any, **options: Any) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            # Norms that change nothing would hide where they are left out.
            parameter.mul_(6.0 if parameter.ndim > 1 else torch.rand_like(parameter) + 0.5)
        model.save_pretrained(folder, **options)


def ours_of(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaDecoder:
    decoder = read_llama(folder, dtype, CPU)
    assert decoder is not None
    return decoder


@torch.inference_mode()
def decoded(decoder: Decoder) -> torch.Tensor:
    """Logits of unequal prompts, and after two more tokens each."""
    forward = PolicyForward(decoder)
    assert forward.recorded
    prompts = [[5, 9, 11, 20, 31, 7, 8, 60], [42], [17, 18, 19]]
    lengths = [len(prompt) for prompt in prompts]
    cache = KvCache(decoder.shape, max_rows=4, dtype=decoder.dtype, device=CPU)
    scratch = cache.scratch(lengths)
    padded = torch.tensor([[0] * (max(lengths) - len(prompt)) + prompt for prompt in prompts])
    seen = [forward(padded, scratch)]
    cache.place(scratch, lengths, [1, 1, 1])
    for token in (30, 31):
        seen.append(forward(torch.full((3, 1), token), cache.window()))
        cache.tick()
    return torch.stack(seen)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SMALL),
        transformers.LlamaConfig(**SMALL, head_dim=6, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        transformers.Qwen3Config(**SMALL, head_dim=16),
        transformers.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True, rms_norm_eps=1e-2),
    ],
    ids=["llama", "llama-theta", "qwen3", "qwen3-tied"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_logits_and_names_are_those_of_transformers(config: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    save_model(tmp_path, config)
    ours, theirs = ours_of(tmp_path, dtype), load_transformers(tmp_path, dtype, CPU)
    for name in ("kind", "shape", "dtype", "device", "vocabulary", "outputs", "longest", "ends"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for (name, weight), (their_name, their_weight) in zip(
        ours.weights.named_parameters(), theirs.weights.named_parameters(), strict=True
    ):
        assert name == their_name
        assert torch.equal(weight, their_weight)
    found, expected = decoded(ours), decoded(theirs)
    assert float(expected.std()) > 0.1
    # A matrix product's last bit depends on where in memory its weights lie.
    assert float((found - expected).abs().max()) < 1e-6 * float(expected.abs().max())


def test_a_step_of_one_token_that_gives_other_logits_is_refused(tmp_path: Path) -> None:
    """Most tokens are sampled from such steps, which have code of their own."""

    class Wrong(LlamaDecoder):
        def of_one(self, *window: torch.Tensor) -> torch.Tensor:
            return super().of_one(*window) + 0.01

    save_model(tmp_path, transformers.LlamaConfig(**SMALL))
    config, tensors = read_config(tmp_path), load_file(tmp_path / "model.safetensors")
    assert config is not None
    assert LlamaDecoder(config, tensors, dtype=torch.float32, device=CPU).single
    with pytest.raises(UsageError, match="does not match the plain model"):
        PolicyForward(Wrong(config, tensors, dtype=torch.float32, device=CPU))


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    save_model(tmp_path, transformers.LlamaConfig(**SMALL), max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    theirs = load_transformers(tmp_path, torch.float32, CPU)
    assert torch.allclose(decoded(ours_of(tmp_path)), decoded(theirs), atol=1e-5)


def test_weights_read_are_no_window_on_the_file(tmp_path: Path) -> None:
    """A checkpoint that is written over must not reach what is being served."""
    save_model(tmp_path, transformers.LlamaConfig(**SMALL))
    ours = ours_of(tmp_path)
    before = {name: weight.clone() for name, weight in ours.named_parameters()}
    with (tmp_path / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\0" * (size // 4))
    assert all(torch.equal(weight, before[name]) for name, weight in ours.named_parameters())


def settings(**changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


def another_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), "model.extra.weight": torch.ones(2)}, file, metadata={"format": "pt"})


def lost_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    "change",
    [
        settings(a_setting_of_next_year=1),
        settings(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        settings(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        settings(rope_parameters=None),
        settings(rope_scaling={"type": "linear", "factor": 2.0}),
        settings(attention_bias=True),
        settings(mlp_bias=True),
        settings(hidden_act="gelu"),
        settings(model_type="mistral"),
        settings(architectures=["LlamaForSequenceClassification"]),
        settings(layer_types=["full_attention", "sliding_attention"]),
        settings(use_sliding_window=True),
        settings(num_key_value_heads=3),
        settings(head_dim=None),
        settings(quantization_config={"quant_method": "gptq"}),
        another_weight,
        lost_weight,
        adapter,
        cut_off,
    ],
)
def test_a_folder_with_anything_else_is_left_to_transformers(change: Callable[[Path], None], tmp_path: Path) -> None:
    save_model(tmp_path, transformers.LlamaConfig(**SMALL))
    ours_of(tmp_path)
    change(tmp_path)
    assert read_llama(tmp_path, torch.float32, CPU) is None


def test_other_models_are_decoded_by_transformers(tmp_path: Path) -> None:
    save_model(tmp_path, transformers.LlamaConfig(**SMALL, attention_bias=True))
    assert isinstance(load_decoder(tmp_path, torch.float32, CPU), TransformersDecoder)


def test_the_main_policys_engine_generates_without_transformers(tiny_policy: Path) -> None:
    """They, torch's compiler and sympy would be more than a third of the CPU of a server's start."""
    program = f"""
import asyncio, sys
from pathlib import Path
from rollout_server.engines.base import GenerationRequest, collect
from rollout_server.engines.torch.core import EngineCore
from rollout_server.engines.torch.engine import CoreSettings, TorchEngine
from services.wire.sampling import SamplingParams

async def main() -> None:
    folder = {str(tiny_policy)!r}
    settings = CoreSettings(
        model=folder, run_id="unit", dtype="float32", max_running=4, threads=1, transport="shm", seed=0
    )
    engine = TorchEngine(EngineCore(settings))
    engine.preload()
    await engine.start()
    request = GenerationRequest("a", [5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True), 2)
    samples = await collect(engine.generate(request))
    assert [len(sample.token_ids) for sample in samples] == [8, 8]
    await engine.weights_digest()
    await engine.close()

asyncio.run(main())
heavy = {{"transformers", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}} & sys.modules.keys()
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
