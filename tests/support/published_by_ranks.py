"""What a learner on one or several ranks publishes, for tests; and what it writes and reads of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from services.config.settings import RunSettings
from services.policies.training.layout import Layout
from tests.support.model_families import make_family
from trainer.checkpoint.checkpoint import gather_policy, restore_newest, snapshot, write, writers_of
from trainer.checkpoint.model_folder import Gathered, load_policy, save_final
from trainer.model.learner import named_weights
from trainer.model.roles import Roles, make_roles
from trainer.parallel.orders import Gather, decode
from trainer.parallel.ranks import Ranks
from weight_bus.publisher.publisher import Publisher
from weight_bus.publisher.ranks import Ranks as PublishingRanks
from weight_bus.transports.shm import ShmExporter


def roles_of(layout: Mapping[str, int], family: str, rank: int = 0) -> Roles:
    """`family`: or the path of a model folder; `rank`: of adapters."""
    shape = Layout(**layout)
    ranks = Ranks.of_group(shape) if shape.ranks > 1 else Ranks.alone()
    settings = RunSettings.model_validate({"trainer": {"lora": {"rank": rank}}} if rank else {})
    policy = partial(load_policy, Path(family)) if Path(family).is_dir() else partial(make_family, family)
    return make_roles(policy, settings, 0, ranks=ranks)


def digest(_: int, layout: Mapping[str, int], family: str, run_id: str) -> str:
    """Of the first policy's bytes, by all ranks."""
    return _digest(roles_of(layout, family), run_id)


def exported(rank: int, layout: Mapping[str, int], folder: str, adapters: int, out: str, run_id: str) -> str:
    """Write the model of `folder`, a step further, as a run's last one; returns the digest that it is published under."""
    roles = roles_of(layout, folder, adapters)
    _step(roles)
    gathered = gather_policy(roles) if rank == 0 else None
    if rank:
        assert decode(roles.ranks.receive()) == Gather()
        assert gather_policy(roles) == Gathered({}, {}), "rank 0 alone has it"
    else:
        save_final(Path(out), roles.learner.model, Path(folder), roles.learner.adapters, gathered)
    return _digest(roles, run_id)


def _step(roles: Roles) -> None:
    """Of AdamW, by a gradient of ones: every number that is trained becomes another."""
    for parameter in roles.learner.model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    roles.learner.apply()


def _digest(roles: Roles, run_id: str) -> str:
    publishing = PublishingRanks() if roles.ranks.several else None
    tensors = roles.learner.published()
    publisher = Publisher(run_id, tensors, "float32", ShmExporter(run_id), 1 << 16, ranks=publishing)
    with closing(publisher):
        found = publisher.digest(1, tensors)
    if publishing is not None:
        publishing.close()
    return found


def held(_: int, layout: Mapping[str, int], family: str) -> int:
    """Numbers of experts' weights that this rank holds."""
    weights = named_weights(roles_of(layout, family).learner.model)
    return sum(
        (each.to_local() if isinstance(each, DTensor) else each).numel()
        for name, each in weights.items()
        if ".experts." in name
    )


def checkpoint(rank: int, layout: Mapping[str, int], family: str, folder: str, adapters: int = 0) -> None:
    """Of a policy whose every number is a step of AdamW away from the first one."""
    roles = roles_of(layout, family, adapters)
    _step(roles)
    writers = writers_of(roles.ranks)
    write(Path(folder), snapshot(roles, "r", "", writers=writers), writers)


def restored(
    rank: int, layout: Mapping[str, int], family: str, folder: str, run_id: str, adapters: int = 0
) -> tuple[int, str]:
    """Version and digest of the bytes that ranks find in a checkpoint."""
    roles = roles_of(layout, family, adapters)
    restore_newest(Path(folder), roles, "r")
    found = _digest(roles, run_id)
    moments = [state["exp_avg"] for state in roles.learner.optimizer.state.values()]
    assert all(bool((moment.to_local() if layout else moment).ne(0).all()) for moment in moments), "as trained"
    return roles.learner.version, found
