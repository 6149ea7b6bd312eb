"""A rank that is not rank 0: it loads what rank 0 loads, and does its part of each order until it is told to stop.

    model folder ─► its share of the models ─► order ─► train · measure · publish · save · restore ─► stop

It has no Redis, no bus, no stream, no log of steps and no metrics: these are rank 0's.
"""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import structlog
import torch

from services.host.process import collect_seldom
from services.host.run_folder import RunFolder, wait_for_model_blocking
from trainer.assembly import BASE_VERSION, TrainerArguments, load_roles, make_publisher
from trainer.checkpoint.checkpoint import Snapshot, gather_policy, restore_version, snapshot, write, writers_of
from trainer.checkpoint.environment import repeat_exactly
from trainer.model.roles import Roles
from trainer.model.train_batch import follow as follow_training
from trainer.parallel.orders import Checkpoint, Digest, Gather, Measure, Order, Publish, Restore, Stop, Train, decode
from trainer.parallel.publishing import publish_part
from trainer.parallel.ranks import Ranks

_log = structlog.get_logger()


def follow(arguments: TrainerArguments, ranks: Ranks, model_within_s: float) -> None:
    """Raises RankError where rank 0 is gone, and what keeps this rank from its part: then all end."""
    structlog.contextvars.bind_contextvars(rank=ranks.rank)
    # Rank 0 decides how a run that is interrupted ends.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(arguments.settings.trainer.thread_count)
    if arguments.settings.trainer.deterministic:
        repeat_exactly()
    wait_for_model_blocking(arguments.model, model_within_s)
    roles = load_roles(arguments, None, ranks)
    with ExitStack() as stack:
        publisher = stack.enter_context(closing(make_publisher(arguments, roles.learner, ranks, stack)))
        _log.info("this rank is ready", layout=str(ranks.layout), base_version=BASE_VERSION)
        collect_seldom()
        checkpoints = RunFolder(arguments.run_dir).checkpoints
        writing = PartWriter(stack.enter_context(ThreadPoolExecutor(1, "checkpoints")), roles, arguments.run_id)
        while True:
            order: Order = decode(ranks.receive())
            writing.check()
            match order:
                case Train() | Measure():
                    follow_training(roles, order)
                case Publish() | Digest():
                    publish_part(publisher, order, roles.learner.published())
                case Checkpoint():
                    writing.begin(order)
                case Gather():
                    gather_policy(roles)
                case Restore(version=version):
                    restore_version(checkpoints, version, roles, arguments.run_id)
                case Stop():
                    writing.wait()
                    break


class PartWriter:
    """Writes this rank's parts of checkpoints, on `thread`, from a copy: training goes on meanwhile."""

    def __init__(self, thread: ThreadPoolExecutor, roles: Roles, run_id: str) -> None:
        self._thread, self._roles, self._run_id = thread, roles, run_id
        self._copy: Snapshot | None = None
        self._written: Future[Path] | None = None

    def begin(self, order: Checkpoint) -> None:
        """Raises what kept the part before from being written."""
        self.wait()
        learner, writers = self._roles.learner, writers_of(self._roles.ranks)
        learner.version, learner.skipped = order.version, order.skipped
        self._copy = snapshot(self._roles, self._run_id, "", self._copy, writers)
        self._written = self._thread.submit(write, Path(order.folder), self._copy, writers)

    def check(self) -> None:
        """Raise what kept a part from being written, if that is known."""
        if self._written is not None and self._written.done():
            self.wait()

    def wait(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None
