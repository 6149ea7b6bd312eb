"""What a learner on one or several ranks publishes, for tests; and what it writes and reads of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch

from services.config.settings import RunSettings
from services.policies.training.layout import Layout
from tests.support.model_families import make_family
from trainer.checkpoint.checkpoint import restore_newest, snapshot, write, writers_of
from trainer.model.roles import Roles, make_roles
from trainer.parallel.ranks import Ranks
from weight_bus.publisher.publisher import Publisher
from weight_bus.publisher.ranks import Ranks as PublishingRanks
from weight_bus.transports.shm import ShmExporter


def roles_of(layout: Mapping[str, int], family: str) -> Roles:
    shape = Layout(**layout)
    ranks = Ranks.of_group(shape) if shape.ranks > 1 else Ranks.alone()
    return make_roles(lambda: make_family(family), RunSettings(), 0, ranks=ranks)


def digest(_: int, layout: Mapping[str, int], family: str, run_id: str) -> str:
    """Of the first policy's bytes, by all ranks."""
    roles = roles_of(layout, family)
    publishing = PublishingRanks() if roles.ranks.several else None
    tensors = roles.learner.published()
    publisher = Publisher(run_id, tensors, "float32", ShmExporter(run_id), 1 << 16, ranks=publishing)
    with closing(publisher):
        found = publisher.digest(1, tensors)
    if publishing is not None:
        publishing.close()
    return found


def checkpoint(rank: int, layout: Mapping[str, int], family: str, folder: str) -> None:
    """Of a policy whose every number is a step of AdamW away from the first one."""
    roles = roles_of(layout, family)
    for parameter in roles.learner.model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    roles.learner.apply()
    writers = writers_of(roles.ranks)
    write(Path(folder), snapshot(roles, "r", "", writers=writers), writers)


def restored(rank: int, layout: Mapping[str, int], family: str, folder: str, run_id: str) -> tuple[int, str]:
    """Version and digest of the bytes that ranks find in a checkpoint."""
    roles = roles_of(layout, family)
    restore_newest(Path(folder), roles, "r")
    publishing = PublishingRanks() if roles.ranks.several else None
    tensors = roles.learner.published()
    with closing(Publisher(run_id, tensors, "float32", ShmExporter(run_id), 1 << 16, ranks=publishing)) as publisher:
        found = publisher.digest(1, tensors)
    if publishing is not None:
        publishing.close()
    moments = [state["exp_avg"] for state in roles.learner.optimizer.state.values()]
    assert all(bool((moment.to_local() if layout else moment).ne(0).all()) for moment in moments), "as trained"
    return roles.learner.version, found
