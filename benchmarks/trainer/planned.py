"""`rollmesh memory` against reality and against its formula.

    peak_vs_estimate    predicted peak ÷ the kernel's: most resident memory of a process that makes the very steps, alone
                        or as one of two ranks (of these the one that takes most)
    formula_vs_fake     the formula's peak ÷ that of the fake run

Each process reads its own high-water mark (`/proc/self/status`, Linux), set back when its libraries are loaded and warm.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.harness.processes import LOOPBACK, free_port
from benchmarks.trainer.report import Measured
from services.config.checks import layout_asked
from services.config.load import load_settings
from services.config.settings import RunSettings
from services.policies.training.memory import estimate
from services.policies.training.model_shape import shape_of
from services.wire.errors import RollmeshError
from trainer.memory.options import Machine, options_of
from trainer.model.roles import make_roles
from trainer.parallel.ranks import Ranks, joined
from trainer.planning.fake_run import Plan, run_fake
from trainer.planning.step import full_batch, run_step

_WITHIN_S = 1800.0


class Case(msgspec.Struct, frozen=True):
    """`configuration`: of config.json, in `transformers`' words; `overrides`: settings; `ranks`: processes, on a CPU."""

    name: str
    configuration: dict[str, Any]
    overrides: list[str] = []
    ranks: int = 1


def sized(
    hidden: int,
    layers: int,
    heads: tuple[int, int, int],
    feed_forward: int,
    vocabulary: int,
    *,
    tied: bool = False,
    kind: str = "qwen3",
    **others: int,
) -> dict[str, Any]:
    """A configuration. `heads`: of queries, of keys, and their dimension."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40_960,
        **others,
    }


QWEN3 = {
    "Qwen3-0.6B": sized(1024, 28, (16, 8, 128), 3072, 151_936, tied=True),
    "Qwen3-1.7B": sized(2048, 28, (16, 8, 128), 6144, 151_936, tied=True),
    "Qwen3-4B": sized(2560, 36, (32, 8, 128), 9728, 151_936, tied=True),
    "Qwen3-8B": sized(4096, 36, (32, 8, 128), 12_288, 151_936),
    "Qwen3-32B": sized(5120, 64, (64, 8, 128), 25_600, 151_936),
    "Qwen3-30B-A3B": sized(
        2048,
        48,
        (32, 4, 128),
        6144,
        151_936,
        kind="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "Llama-3-70B": sized(8192, 80, (64, 8, 128), 28_672, 128_256, kind="llama"),
}
"""Shapes of known models, for plans."""

_SMALL = {
    "deep": sized(256, 12, (8, 4, 32), 768, 4096, tied=True),
    "wide": sized(768, 4, (12, 4, 64), 2304, 8192),
    "vocabulary": sized(256, 4, (8, 8, 32), 768, 65_536, tied=True),
    "llama": sized(512, 6, (8, 8, 64), 1536, 8192, kind="llama"),
    "qwen2": sized(512, 6, (8, 2, 64), 1536, 8192, kind="qwen2", use_sliding_window=False),
    "experts": sized(
        256, 6, (8, 4, 32), 768, 8192, kind="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256
    ),
}
"""Six that a CPU trains in seconds."""
_OPTIONS = {
    "": ["trainer.micro_batch_tokens=2048"],
    "selective": ["trainer.micro_batch_tokens=2048", "trainer.activation_checkpointing=selective"],
    "full": ["trainer.micro_batch_tokens=2048", "trainer.activation_checkpointing=full"],
    "adapters": ["trainer.micro_batch_tokens=2048", "trainer.lora.rank=16"],
    "8 bits": ["trainer.micro_batch_tokens=2048", "trainer.optimizer.state_bits=8"],
    "critic, reference": [
        "trainer.micro_batch_tokens=1024",
        "trainer.advantage.estimator=gae",
        "trainer.loss.kl=0.1",
        "trainer.activation_checkpointing=full",
    ],
    "bfloat16": ["trainer.micro_batch_tokens=2048", "trainer.dtype=bfloat16"],
    "tensor": ["trainer.micro_batch_tokens=2048", "trainer.parallel.tensor=2"],
    "context": ["trainer.micro_batch_tokens=2048", "trainer.parallel.context=2"],
    "split": ["trainer.micro_batch_tokens=2048", "trainer.parallel.expert=2"],
    "split, tensor": [
        "trainer.micro_batch_tokens=2048",
        "trainer.parallel.tensor=2",
        "trainer.parallel.expert=2",
    ],
}
_ALONE = frozenset({"8 bits"})
_SPLIT = frozenset({"split", "split, tensor"})
_TOGETHER = frozenset({"tensor", "context"}) | _SPLIT
"""Options that one rank alone has, that mixtures of experts have, and that two ranks have."""


def _case(model: str, option: str, ranks: int) -> Case:
    name = f"{model}, {option}".removesuffix(", ") + (f", {ranks} ranks" if ranks > 1 else "")
    return Case(name, _SMALL[model], _OPTIONS[option], ranks)


EVERY = tuple(
    _case(model, option, ranks)
    for ranks, others in ((1, _TOGETHER), (2, _ALONE))
    for model in _SMALL
    for option in _OPTIONS
    if option not in others and (option not in _SPLIT or model == "experts")
)
"""92 of them: half an hour."""
SOME = tuple(
    _case(model, option, ranks)
    for model, option, ranks in (
        ("deep", "selective", 1),
        ("wide", "full", 1),
        ("vocabulary", "", 1),
        ("llama", "adapters", 1),
        ("qwen2", "8 bits", 1),
        ("experts", "critic, reference", 1),
        ("deep", "", 2),
        ("wide", "bfloat16", 2),
        ("vocabulary", "full", 2),
        ("llama", "tensor", 2),
        ("qwen2", "context", 2),
        ("experts", "critic, reference", 2),
        ("experts", "split", 2),
        ("experts", "split, tensor", 2),
    )
)
"""Each model alone and on two ranks, each option once: minutes."""


_GPU_BYTES = 80 << 30


def _large(name: str, ranks: int, *overrides: str, layers: int = 6) -> tuple[Case, Machine]:
    """Of a known model, on so many GPUs; a few of its layers, for the sake of time."""
    configuration = {**QWEN3[name], "num_hidden_layers": layers}
    split = next((f", experts split by {each.rpartition('=')[2]}" for each in overrides if ".expert=" in each), "")
    case = Case(f"{name} on {ranks}{split}", configuration, ["trainer.micro_batch_tokens=4096", *overrides])
    return case, Machine(ranks, _GPU_BYTES)


_FULL, _SELECTIVE = (f"trainer.activation_checkpointing={which}" for which in ("full", "selective"))
LARGE = (
    _large("Qwen3-0.6B", 1),
    _large("Qwen3-1.7B", 1, "trainer.lora.rank=16", _FULL),
    _large("Qwen3-4B", 4, _SELECTIVE),
    _large("Qwen3-8B", 8),
    _large("Qwen3-30B-A3B", 8, _FULL),
    _large("Qwen3-30B-A3B", 8, _FULL, "trainer.parallel.expert=8"),
    _large("Qwen3-30B-A3B", 16, "trainer.parallel.expert=8"),
    _large("Qwen3-32B", 16, _FULL),
    _large("Llama-3-70B", 32, _FULL),
)
"""Nine that only plans are made of."""
SOME_LARGE = (*LARGE[:3], LARGE[5])


def config_of(case: Case) -> Any:
    """As `transformers` has it."""
    said = dict(case.configuration)
    return AutoConfig.for_model(said.pop("model_type"), **said)


def settings_of(case: Case) -> RunSettings:
    return load_settings(None, case.overrides)


def predicted(case: Case, machine: Machine | None = None) -> Plan:
    """By the fake run; left out: for the CPU that would measure it."""
    settings = settings_of(case)
    return run_fake(config_of(case), settings, options_of(settings, machine or Machine(case.ranks)))


def by_formula(case: Case, machine: Machine | None = None) -> int:
    """Bytes."""
    options = options_of(settings_of(case), machine or Machine(case.ranks))
    return estimate(shape_of(case.configuration), options).total


class Trainers:
    """A process whose libraries are loaded, of which every rank of every case is a copy (fork): none loads them again."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def measured(self, case: Case) -> int:
        """Bytes that a process takes for the steps, above those of its libraries; of several ranks the most that one does.

        Raises RollmeshError where one fails, and TimeoutError.
        """
        ask, answer = self._process.stdin, self._process.stdout
        assert ask is not None
        assert answer is not None
        ask.write(msgspec.json.encode(case) + b"\n")
        async with asyncio.timeout(_WITHIN_S):
            said = await answer.readline()
        if not said:
            raise RollmeshError(f"{case.name}: a process that trains it failed", "see above")
        return msgspec.json.decode(said, type=int)


@asynccontextmanager
async def trainers(threads: int = 1) -> AsyncIterator[Trainers]:
    """`threads`: of torch, in each process."""
    command = (sys.executable, "-P", "-m", "benchmarks.trainer.planned", str(threads))
    # Freed memory goes back at once, so that what is resident is what is held.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environ,
        # Ranks are its children: all end together.
        start_new_session=True,
    )
    try:
        yield Trainers(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@dataclass
class _Ratios:
    """By case; the figure is the one farthest from 1."""

    found: dict[str, float] = field(default_factory=dict)

    @property
    def farthest(self) -> list[float]:
        return [max(self.found.values(), key=lambda ratio: abs(ratio - 1.0))] if self.found else []

    @property
    def words(self) -> str:
        return ", ".join(f"{name}: {ratio:.3f}" for name, ratio in self.found.items())


async def measure_plans(
    say: Callable[[str], None],
    threads: int = 1,
    cases: Sequence[Case] = SOME,
    large: Sequence[tuple[Case, Machine]] = SOME_LARGE,
) -> Measured:
    """Both figures, of these cases: the ratio farthest from 1. The `large` ones are not trained."""
    real, formula = _Ratios(), _Ratios()
    async with trainers(threads) as them:
        for case in cases:
            plan, taken = predicted(case).tightest.total, await them.measured(case)
            real.found[case.name] = plan / taken
            formula.found[case.name] = by_formula(case) / plan
            say(
                f"{case.name}: {plan >> 20} MiB predicted, {taken >> 20} measured, {by_formula(case) >> 20} by the formula"
            )
    for case, machine in large:
        plan, said = predicted(case, machine).tightest.total, by_formula(case, machine)
        formula.found[case.name] = said / plan
        say(f"{case.name}: {plan >> 20} MiB predicted, {said >> 20} by the formula")
    return Measured(
        rounds={"peak_vs_estimate": real.farthest, "formula_vs_fake": formula.farthest},
        seen={"peak_vs_estimate, by case": real.words, "formula_vs_fake, by case": formula.words},
    )


def _held(which: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which)]
    return int(line.split()[1]) << 10


def _train(case: Case, ranks: Ranks) -> int:
    """The steps that a plan is of, with real tensors. Returns the most bytes that they took, above those before."""
    settings, config, before = settings_of(case), config_of(case), _held("VmRSS")

    def load() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model

    roles = make_roles(load, settings, 0, ranks=ranks)
    # 5: set the high-water mark back (Linux, proc(5)). These are steps: how ranks load weights is measured elsewhere.
    Path("/proc/self/clear_refs").write_text("5")
    tokens = settings.trainer.micro_batch_tokens
    # The first makes the optimizer's state, whatever it is of.
    run_step(roles, full_batch(roles, min(64, tokens)))
    run_step(roles, full_batch(roles, tokens, passes=2))
    return _held("VmHWM") - before


def _rank(case: Case, rank: int, port: int, told: Connection) -> None:
    """One rank's part, in a process of its own: tells the bytes that it took."""
    # Some libraries print: standard output is for answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "WORLD_SIZE": str(case.ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.manual_seed(0)
    few = [each for each in case.overrides if "micro_batch_tokens" not in each]
    layout = layout_asked(settings_of(case).trainer.parallel, case.ranks)
    with joined(layout) as ranks:
        # Libraries are loaded and warm before memory is read.
        small = {
            **case.configuration,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "intermediate_size": 64,
            "vocab_size": 128,
        }
        _train(Case("warm", small, [*few, "trainer.micro_batch_tokens=64"]), ranks)
        told.send_bytes(str(_train(case, ranks)).encode())


def main(threads: int) -> None:
    """Answers each case on standard input by a line on standard output. Ends with exit code 1 where a rank fails."""
    torch.set_num_threads(threads)
    context = multiprocessing.get_context("fork")
    for line in sys.stdin.buffer:
        case, port = msgspec.json.decode(line, type=Case), free_port()
        asked = [context.Pipe(duplex=False) for _ in range(case.ranks)]
        ranks = [context.Process(target=_rank, args=(case, rank, port, told)) for rank, (_, told) in enumerate(asked)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(1)
        sys.stdout.write(f"{max(int(answer.recv_bytes()) for answer, _ in asked)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
