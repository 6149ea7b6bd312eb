"""One rank of several that each take a device of their own, for tests: NCCL between GPUs, gloo where there are none.

python -m tests.support.device_ranks OUT WHAT ARGUMENTS      started once a rank (`benchmarks.harness.ranked`); ARGUMENTS
                                                             are JSON; rank 0 writes OUT
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.ranked import run_ranks
from benchmarks.trainer.device import Shape
from benchmarks.trainer.step_speed import HeavyTail, as_groups
from services.config.settings import RunSettings
from services.policies.training.layout import Layout
from tests.support.trained_by_ranks import train
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import follow, train_batch
from trainer.parallel.orders import Stop, decode, tell
from trainer.parallel.ranks import Ranks, joined
from weight_bus.publisher.publisher import Publisher
from weight_bus.publisher.ranks import Ranks as PublishingRanks
from weight_bus.transports.shm import ShmExporter

WITHIN_S = 900.0
Answers = dict[str, Any]


async def on_devices(ranks: int, what: str, arguments: Answers, folder: Path) -> Path:
    """What rank 0 of so many has written into `folder`. Raises RollmeshError when a rank fails."""
    out = folder / f"{what}-{ranks}"
    words = (str(out), what, json.dumps(arguments))
    await run_ranks(ranks, "tests.support.device_ranks", words, folder, WITHIN_S)
    return out


def steps(own: Ranks, out: Path, settings: Answers) -> None:
    """First gradients and last weights of three steps of the small policy (`trained_by_ranks`), as npz."""
    found = train(own.rank, {}, settings, steps=3, ranks=own)
    if found is not None:
        with out.open("wb") as file:
            np.savez(file, **{f"gradient {name}": each for name, each in found[1].items()}, **found[2])


def publishing(own: Ranks, out: Path, shape: Answers, rounds: int, run_id: str) -> None:
    """Seconds that publishing holds up training, and those of one copy of as many bytes to pinned memory: of the slowest
    rank, the median of `rounds`."""
    roles = _roles(own, Shape(**shape), {})
    tensors, blocked, copied = roles.learner.published(), list[float](), list[float]()
    with ExitStack() as stack:
        ranks = None
        if own.several:
            ranks = PublishingRanks()
            stack.callback(ranks.close)
        publisher = stack.enter_context(
            closing(Publisher(run_id, tensors, "bfloat16", ShmExporter(run_id), 64 << 20, ranks=ranks))
        )
        size = publisher.held_bytes // 2
        source = torch.ones(size, dtype=torch.uint8, device=own.device)
        target = torch.empty(size, dtype=torch.uint8, pin_memory=own.device.type == "cuda")
        for version in range(1, rounds + 1):
            own.gather(b"")
            began = _now(own)
            publication = publisher.publish(version, tensors)
            blocked.append(_now(own) - began)
            publication.manifest()
            own.gather(b"")
            began = _now(own)
            target.copy_(source)
            copied.append(_now(own) - began)
    # The first of each touches memory that is new.
    medians = json.dumps([statistics.median(each[1:]) for each in (blocked, copied)]).encode()
    slowest = [max(each) for each in zip(*map(json.loads, own.gather(medians)), strict=True)]
    if own.leads:
        out.write_text(json.dumps(dict(zip(("blocked_s", "copy_s"), slowest, strict=True))))


def speed(own: Ranks, out: Path, shape: Answers, tokens: int, row: int, rounds: int) -> None:
    """Median seconds of a step of `tokens` on each rank, in rows of `row`."""
    of = Shape(**shape)
    roles = _roles(own, of, {"micro_batch_tokens": tokens})
    if not own.leads:
        _follow(roles)
        return
    rows = tokens // row * own.layout.shares
    tail = HeavyTail(rows // 2, 2, float(row - 1), 0.0, row - 1, vocabulary=of.vocabulary, prompt=1)
    settings = _settings({"micro_batch_tokens": tokens}, rounds + 2)
    groups, took = as_groups(tail.answers(1), tail.group_size), list[float]()
    for _ in range(rounds + 2):
        began = _now(own)
        train_batch(roles, settings, groups, 1)
        took.append(_now(own) - began)
    tell(own, Stop())
    out.write_text(json.dumps(statistics.median(took[2:])))


def _settings(trainer: Answers, steps: int = 100) -> RunSettings:
    return RunSettings.model_validate({"steps": steps, "k": steps, "trainer": trainer})


def _roles(own: Ranks, shape: Shape, trainer: Answers) -> Roles:
    return make_roles(lambda: shape.model(own.device), _settings(trainer), 0, ranks=own)


def _follow(roles: Roles) -> None:
    while not isinstance(order := decode(roles.ranks.receive()), Stop):
        follow(roles, order)


def _now(own: Ranks) -> float:
    """Once the device has done what it was given."""
    if own.device.type == "cuda":
        torch.cuda.synchronize(own.device)
    return time.perf_counter()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(Layout(data=int(os.environ["WORLD_SIZE"]))) as mine:
        {each.__name__: each for each in (steps, publishing, speed)}[sys.argv[2]](
            mine, Path(sys.argv[1]), **json.loads(sys.argv[3])
        )
