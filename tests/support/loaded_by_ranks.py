"""What ranks have of a model folder that each of them has read its part of, for tests: against all of it, read by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.config.settings import RunSettings
from services.policies.training.layout import Layout
from trainer.checkpoint.model_folder import load_policy
from trainer.checkpoint.shared_folder import SharedFolder
from trainer.model.learner import named_weights
from trainer.model.roles import Roles, make_roles
from trainer.parallel.ranks import Ranks
from trainer.parallel.sharding import cut, shard, whole


def differences(_: int, layout: Mapping[str, int], trainer: Mapping[str, Any], folders: list[str]) -> list[str]:
    """Names of weights, of all models of a run, that are not those of one process that has loaded all of the folder."""
    ranks, found = Ranks.of_group(Layout(**layout)), list[str]()
    settings = RunSettings.model_validate({"trainer": trainer})
    for path in folders:
        folder = Path(path)
        shared = SharedFolder(folder)
        roles = make_roles(shared.empty, settings, 0, ranks=ranks, fill=shared.fill)
        alone = make_roles(lambda folder=folder: load_policy(folder), settings, 0)
        wanted = dict(_tensors(alone))
        had = dict(_tensors(roles))
        assert had.keys() == wanted.keys() and len(had) > 20
        found += [f"{folder.name}: {name}" for name, each in had.items() if not _same(each, wanted[name])]
        found += [f"{folder.name}: {each}" for each in _unlike(roles.learner.model, alone.learner.model)]
    return found


def _tensors(roles: Roles) -> Iterator[tuple[str, Tensor]]:
    models = {name: model for name, (model, _) in roles.models().items()}
    if roles.learner.reference is not None and roles.learner.adapters is None:
        models["reference"] = roles.learner.reference._policy._model
    for role, model in models.items():
        yield from ((f"{role} {name}", each) for name, each in named_weights(model).items())
        # Rotary frequencies and the like, which no file has.
        yield from ((f"{role} {name}", each) for name, each in model.named_buffers())


def _same(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(whole(found), wanted)


def _unlike(found: PreTrainedModel, wanted: PreTrainedModel) -> list[str]:
    """What else of a model differs: what is trained, and what is written of it beside weights."""
    trained = [{name for name, each in model.named_parameters() if each.requires_grad} for model in (found, wanted)]
    said = [(model.config.to_dict(), model.generation_config.to_dict()) for model in (found, wanted)]
    conversions = [repr(getattr(model, "_weight_conversions", None)) for model in (found, wanted)]
    pairs = {"what is trained": trained, "configuration": said, "conversions": conversions}
    return [what for what, (first, second) in pairs.items() if first != second]


def most_resident(_: int, layout: Mapping[str, int], folder: str, warm: str) -> tuple[int, int]:
    """Bytes of this rank's part, and the most that its process took of memory for loading it, mapped files included."""
    ranks = Ranks.of_group(Layout(**layout))
    for path in (warm, folder):
        # 5: set the high-water mark back (Linux, proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
        before, shared = _held("VmRSS"), SharedFolder(Path(path))
        model = shared.empty()
        cut(model, ranks)
        shard(model, ranks)
        shared.fill(model, ranks.device)
        taken = _held("VmHWM") - before
    return sum(each.to_local().nbytes for each in model.parameters()), taken


def _held(which: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which)]
    return int(line.split()[1]) << 10
