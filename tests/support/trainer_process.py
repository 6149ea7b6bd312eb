"""`rollmesh train` as a process, with what it needs around it: Redis, a real weight bus, an engine that really receives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import count
from pathlib import Path

import torch
from redis.asyncio import Redis

from services.config.samples import SampleSettings
from services.config.settings import RolloutSettings, RunSettings, TrainerSettings, WeightSettings
from services.run_store.ledger import Ledger
from services.run_store.publishing import TrajectoryWriter
from services.run_store.status import read_waits
from services.wire.trajectory import Trajectory
from tests.support.forked_command import ForkedCommand
from tests.support.trajectories import grouped, random_trajectories
from tests.weight_parts import PlainTarget, SmallEngine, served
from trainer.checkpoint.model_folder import load_policy
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.metrics.files import read_metrics
from trainer.model.learner import Learner, named_weights
from weight_bus.client.bus_client import BusClient
from weight_bus.coordinator.app import build_app
from weight_bus.receiver.receiver import Receiver
from weight_bus.transports.shm import ShmReader

GROUPS, SIZE, STEPS = 2, 3, 6
DEADLINE_S = 240.0
"""On a machine that is busy with other things a start takes a minute."""

SETTINGS = RunSettings(
    steps=STEPS,
    k=STEPS,
    rollout=RolloutSettings(groups_per_step=GROUPS, group_size=SIZE),
    trainer=TrainerSettings(checkpoint_every=2, batch_timeout_s=60.0),
    weights=WeightSettings(transport="shm"),
    samples=SampleSettings(cpu_share=1.0),
)


class TrainerMesh:
    """What a trainer needs around it: Redis, a bus, and an engine that loaded the same model folder."""

    def __init__(self, run_id: str, redis: Redis, redis_url: str, run_dir: Path, model: Path) -> None:
        self.run_id, self.redis, self.redis_url = run_id, redis, redis_url
        self.run_dir, self.model = run_dir, model
        self.bus_url = ""
        self.engine: SmallEngine
        self.target: PlainTarget
        self.writer, self.ledger = TrajectoryWriter(redis, run_id), Ledger(redis, run_id)

    async def start(self, stack: AsyncExitStack) -> None:
        self.bus_url = await stack.enter_async_context(served(build_app(self.run_id, 5.0, lease_s=600.0)))
        self.target = PlainTarget(named_weights(load_policy(self.model)))
        self.engine = SmallEngine("e", Receiver(self.target, self.run_id, [ShmReader()]))
        stack.callback(self.engine.receiver.close)
        url = await stack.enter_async_context(served(self.engine.app()))
        bus = await stack.enter_async_context(BusClient(self.bus_url, self.run_id))
        await bus.register("e", url, 0)

    def trainer(self) -> ForkedCommand:
        options = {
            "run-id": self.run_id,
            "config": self.run_dir / "config.toml",
            "model": self.model,
            "run-dir": self.run_dir,
            "redis-url": self.redis_url,
            "bus-url": self.bus_url,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        return ForkedCommand(["train", *arguments], self.run_dir.with_name("trainer.log"))

    def steps_of_groups(self, steps: int) -> list[list[Trajectory]]:
        """What each of so many steps is trained on."""
        return [
            random_trajectories(step, groups=GROUPS, size=SIZE, run_id=self.run_id, first_ordinal=step * GROUPS)
            for step in range(steps)
        ]

    async def until(self, steps: int, trainer: ForkedCommand) -> None:
        """Wait until metrics.jsonl holds `steps` steps and the trainer waits for the batch of the next."""
        following = re.compile(rf"the batch of steps? {steps + 1}\b")
        async with asyncio.timeout(DEADLINE_S):
            for _ in count():
                assert trainer.poll() is None, trainer.errors()
                waits_for = (await self.waits()).get("trainer", "")
                if len(read_metrics(self.run_dir / "metrics.jsonl")) >= steps and following.match(waits_for):
                    return
                await asyncio.sleep(0.02)

    async def waits(self) -> dict[str, str]:
        return {name: wait.waiting_for for name, wait in (await read_waits(self.redis, self.run_id)).items()}


def undisturbed(model: Path, batches: Sequence[Sequence[Sequence[Trajectory]]]) -> dict[str, torch.Tensor]:
    """The weights after these batches, each of parts that are a step, trained in one go in this process."""
    learner = Learner(load_policy(model), SETTINGS.trainer)
    for batch in batches:
        judged = [rows_of(grouped(part), learner.version + step, SETTINGS.k) for step, part in enumerate(batch)]
        packed = [
            pack(rows, tally, SETTINGS.trainer.micro_batch_tokens, stem_width=learner.stem_width)
            for rows, tally in judged
        ]
        assert len(list(learner.steps(packed))) == len(batch)
    return learner.weights()


async def ended(trainer: ForkedCommand) -> tuple[int, str]:
    """Its exit code, and what it wrote to standard error."""
    code = await asyncio.to_thread(trainer.wait, DEADLINE_S)
    return code, trainer.errors()


async def waiting_for(mesh: TrainerMesh, what: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for _ in count():
            if (await mesh.waits()).get("trainer") == what:
                return
            await asyncio.sleep(0.02)


@contextmanager
def in_one_thread() -> Iterator[None]:
    """With torch's sums in the order that the trainer's process makes them in."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
