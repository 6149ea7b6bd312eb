"""Peak memory and CPU time of the language head and of activations, in a process of its own.

    head     chunked, plain: M tokens of a vocabulary V, hidden states and weight with gradients, entropy, temperatures
    layers   checkpointed, kept: forward and backward of a model of 16 layers

The peak is the kernel's high-water mark of the process's resident memory, set back before each arm.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.trainer.report import Measured
from services.wire.errors import RollmeshError
from trainer.memory.activations import recompute_activations
from trainer.model.head import head_terms, logit_terms
from trainer.sft.tiny_model import build_model

_WITHIN_S = 900.0


class Peak(msgspec.Struct, frozen=True):
    """`peak`: bytes above those held before; `cpu_s`: of the work, `digest`: a sum of its gradients."""

    peak: int
    cpu_s: float
    digest: float


@dataclass(frozen=True)
class Sizes:
    """Of the head `tokens` M, `vocabulary` V, `hidden` H; of the layers tokens in a `row` and their `width`."""

    tokens: int = 4096
    vocabulary: int = 151_936
    hidden: int = 1024
    row: int = 2048
    width: int = 256

    @property
    def logits_bytes(self) -> int:
        return 4 * self.tokens * self.vocabulary


async def measure_peaks(rounds: int, threads: int, say: Callable[[str], None], size: Sizes | None = None) -> Measured:
    """`rounds` of all four arms. Raises RollmeshError for a process that fails."""
    size = Sizes() if size is None else size
    found: dict[str, list[float]] = {"head_peak": [], "head_time": [], "ckpt_peak": []}
    for number in range(rounds):
        chunked, plain, full, none = await _run(threads, size)
        if full.digest != none.digest:
            raise RollmeshError(f"checkpointed layers give other gradients ({full.digest}, not {none.digest})")
        found["head_peak"].append(chunked.peak / size.logits_bytes)
        found["head_time"].append(chunked.cpu_s / plain.cpu_s)
        found["ckpt_peak"].append(full.peak / none.peak)
        ours, theirs = (f"{peak.peak >> 20} MiB, {peak.cpu_s:.1f} s" for peak in (chunked, plain))
        say(f"head {number + 1}: {ours}; plain {theirs}")
        say(f"layers {number + 1}: {full.peak >> 20} MiB checkpointed, {none.peak >> 20} MiB not")
    seen = {
        "head": f"{size.tokens} tokens of {size.vocabulary}, hidden size {size.hidden}, all gradients, {threads} thread(s)",
        "layers": f"16 layers of {size.width}, {size.row} tokens in one row",
    }
    return Measured(rounds=found, seen=seen)


async def _run(threads: int, size: Sizes) -> list[Peak]:
    shape = (size.tokens, size.vocabulary, size.hidden, size.row, size.width)
    command = (sys.executable, "-P", "-m", "benchmarks.trainer.peaks", *map(str, (threads, *shape)))
    # Freed memory goes back at once, so that what is resident is what is held.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environ)
    try:
        async with asyncio.timeout(_WITHIN_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise RollmeshError(f"{' '.join(command)} ended with {process.returncode}", "see above")
    return msgspec.json.decode(said, type=list[Peak])


def _held(which: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which)]
    return int(line.split()[1]) << 10


def _measured(work: Callable[[], float]) -> Peak:
    # 5: set the high-water mark back (Linux, proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _held("VmRSS"), time.process_time()
    digest = work()
    return Peak(_held("VmHWM") - before, time.process_time() - began, digest)


def _head(chunked: bool, tokens: int, vocabulary: int, hidden: int) -> Peak:
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden).requires_grad_()
    weight = (torch.randn(vocabulary, hidden) / hidden**0.5).requires_grad_()
    sampled = torch.randint(0, vocabulary, (tokens,))
    temperature = torch.full((tokens,), 0.8)

    def work() -> float:
        if chunked:
            terms = head_terms(states, weight, sampled, temperature, entropy=True)
        else:
            terms = logit_terms(states @ weight.t(), sampled, temperature, entropy=True)
        assert terms.entropy is not None
        (terms.logprobs.sum() + 0.01 * terms.entropy.sum()).backward()  # type: ignore[no-untyped-call]
        gradients: list[Tensor | None] = [states.grad, weight.grad]
        # Without a copy, which would be the peak.
        return float(sum(torch.linalg.vector_norm(each, 1) for each in gradients if each is not None))

    return _measured(work)


def _layers(checkpointed: bool, row: int, width: int) -> Peak:
    model = build_model(1, hidden_size=width, layers=16).eval()
    recompute_activations(model, "full" if checkpointed else "none")
    ids = torch.arange(row)[None] % 60
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            # 0.1, which suits the tiny model, makes gradients overflow through 16 layers of this width.
            torch.nn.init.normal_(parameter, std=0.02)
        # Now, so that none is made while activations are held.
        parameter.grad = torch.zeros_like(parameter)

    def work() -> float:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        hidden.square().mean().backward()
        return float(
            sum(parameter.grad.double().sum() for parameter in model.parameters() if parameter.grad is not None)
        )

    return _measured(work)


def main(threads: int, tokens: int, vocabulary: int, hidden: int, row: int, width: int) -> None:
    torch.set_num_threads(threads)
    heads = [_head(chunked, tokens, vocabulary, hidden) for chunked in (True, False)]
    layers = [_layers(checkpointed, row, width) for checkpointed in (True, False)]
    sys.stdout.buffer.write(msgspec.json.encode([*heads, *layers]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
