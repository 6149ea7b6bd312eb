"""A rank that is not rank 0: it loads what rank 0 loads, and does its part of each order until it is told to stop.

    model folder ─► its share of the models ─► order ─► train · measure · publish · gather · restore ─► stop

It has no Redis, no bus, no stream, no log of steps and no metrics: these are rank 0's.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing

import structlog
import torch

from services.host.process import collect_seldom
from services.host.run_folder import RunFolder, wait_for_model_blocking
from trainer.assembly import BASE_VERSION, TrainerArguments, load_roles, make_publisher
from trainer.checkpoint.checkpoint import restore_version, take_part
from trainer.checkpoint.environment import repeat_exactly
from trainer.model.train_batch import follow as follow_training
from trainer.parallel.orders import Digest, Gather, Measure, Order, Publish, Restore, Stop, Train, decode
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
        while True:
            order: Order = decode(ranks.receive())
            match order:
                case Train() | Measure():
                    follow_training(roles, order)
                case Publish() | Digest():
                    publish_part(publisher, order, roles.learner.published())
                case Gather(optimizer=optimizer):
                    take_part(roles, optimizer=optimizer)
                case Restore(version=version):
                    restore_version(checkpoints, version, roles, arguments.run_id)
                case Stop():
                    break
