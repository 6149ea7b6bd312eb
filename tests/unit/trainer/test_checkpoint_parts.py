"""Checkpoints that several ranks write, a part each: any number of ranks goes on from them, with the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from services.config.settings import TrainerSettings
from services.config.training.algorithm import AdvantageSettings
from services.wire.errors import DeadlineError, UsageError
from tests.support.rank_pool import RankPool
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.checkpoint import checkpoint
from trainer.checkpoint.parts import Part, Stored, Writers, unspread, write_tensors
from trainer.model.critic import Critic, ValueModel
from trainer.model.learner import Learner, trained_weights
from trainer.model.roles import Roles
from trainer.sft.tiny_model import build_model

State = dict[str, Any]


def roles_of(layout: str, seed: int) -> Roles:
    """A policy and a critic, spread over the ranks there are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def spread(model: nn.Module) -> None:
        if layout == "alone":
            return
        shape = (2, 2) if layout == "hsdp" else (torch.distributed.get_world_size(),)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "data")[-len(shape) :])
        for layer in [each for each in model.modules() if type(each).__name__.endswith("DecoderLayer")]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    settings = TrainerSettings()
    policy, of_critic = (build_model(seed + each, hidden_size=32, layers=2) for each in (0, 1))
    learner, critic = Learner(policy, settings), Critic(ValueModel(of_critic), settings)
    for role, model in ((learner, policy), (critic, critic.model)):
        # Sharded once what enters a model below its root is made, and before its optimizer.
        spread(model)
        role.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Roles(learner, AdvantageComputer(AdvantageSettings()), critic)


def trained(roles: Roles, steps: int) -> None:
    """Optimizer steps by gradients that follow from the weights."""
    for _ in range(steps):
        for model, optimizer in roles.models().values():
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 0.1 + 0.01
            optimizer.step()
        roles.learner.version += 1


def whole_state(roles: Roles) -> State:
    """Weights and optimizer state, as numpy arrays of whole tensors."""
    found: State = {}
    for name, (model, optimizer) in roles.models().items():
        state = checkpoint._optimizer_state(model, optimizer)
        for key, tensor in {**trained_weights(model), **state}.items():
            found[f"{name} {key}"] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).numpy().copy()
    return found


def write(rank: int, layout: str, folder: str) -> State:
    roles = roles_of(layout, 5)
    trained(roles, 2)
    writers = Writers(rank, torch.distributed.get_world_size(), "first", deadline_s=60)
    taken = checkpoint.snapshot(roles, "r", "f", writers=writers)
    held = {tensor.data_ptr() for tensors in taken.tensors.values() for tensor in tensors.values()}
    live = sum(part.to_local().nbytes if hasattr(part, "to_local") else part.nbytes for part in tensors_of(roles))
    assert sum(tensor.nbytes for tensors in taken.tensors.values() for tensor in tensors.values()) <= live
    checkpoint.save_part(Path(folder), taken, writers)
    saved = whole_state(roles)
    # Training goes on while files are written, and the next copy is made over the last one.
    trained(roles, 1)
    again = checkpoint.snapshot(roles, "r", "f", taken, writers)
    assert {tensor.data_ptr() for tensors in again.tensors.values() for tensor in tensors.values()} == held
    checkpoint.save_part(Path(folder), again, writers)
    return saved


def tensors_of(roles: Roles) -> list[Any]:
    return [
        tensor
        for model, optimizer in roles.models().values()
        for tensor in (*trained_weights(model).values(), *checkpoint._optimizer_state(model, optimizer).values())
    ]


def read(_: int, layout: str, folder: str) -> tuple[int | None, State, State]:
    """What is restored, and what a further step makes of it."""
    roles = roles_of(layout, 50)
    version = checkpoint.restore_newest(Path(folder), roles, "r")
    restored = whole_state(roles)
    trained(roles, 1)
    return version, restored, whole_state(roles)


def assert_equal(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys() and len(found) > 100
    for key, expected in wanted.items():
        assert np.array_equal(found[key], expected), key


@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
def test_what_four_ranks_wrote_two_and_one_go_on_from(rank_pool: RankPool, tmp_path: Path, layout: str) -> None:
    saved = rank_pool.run(4, write, layout, str(tmp_path))[0]
    assert checkpoint.good_versions(tmp_path) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    newest = tmp_path / "step-00000003"
    sizes = [path.stat().st_size for path in sorted(newest.glob("model-*"))]
    assert len(sizes) == 4 and (layout == "hsdp" or max(sizes) < 1.2 * min(sizes))
    # The newest is broken on one rank's disk: all go on from the one before it.
    part = next(newest.glob("optimizer-00001-*"))
    part.write_bytes(part.read_bytes()[:-8])
    answers = [rank_pool.run(2, read, "fsdp", str(tmp_path))[0], rank_pool.run(1, read, "alone", str(tmp_path))[0]]
    for version, restored, _ in answers:
        assert version == 2
        assert_equal(restored, saved)
    assert_equal(answers[0][2], answers[1][2])


def test_what_one_rank_wrote_two_go_on_from(rank_pool: RankPool, tmp_path: Path) -> None:
    roles = roles_of("alone", 5)
    trained(roles, 2)
    checkpoint.save(tmp_path, checkpoint.snapshot(roles, "r", "f"))
    version, restored, _ = rank_pool.run(2, read, "fsdp", str(tmp_path))[0]
    assert version == 2
    assert_equal(restored, whole_state(roles))


def test_a_rank_that_does_not_write_leaves_no_checkpoint_behind(tmp_path: Path) -> None:
    roles = roles_of("alone", 5)
    for launch in ("first", "second"):
        writers = Writers(0, 2, launch, deadline_s=0.05)
        with pytest.raises(DeadlineError, match="rank 1 has not written its part of step-00000000"):
            checkpoint.save_part(tmp_path, checkpoint.snapshot(roles, "r", "f", writers=writers), writers)
    assert [path.name for path in tmp_path.iterdir()] == [".parts-second-step-00000000"]
    assert checkpoint.restore_newest(tmp_path, roles, "r") is None


def test_parts_that_lack_something_are_not_filled_up(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    left, right = Part((4, 6), (((0, 4),), ((0, 2), (4, 6)))), Part((4, 6), (((0, 4),), ((2, 4),)))
    write_tensors(tmp_path / "model-00000-of-00002.safetensors", {"a": whole[:, [0, 1, 4, 5]]}, {"a": left})
    with Stored.of_checkpoint(tmp_path, "model") as stored, pytest.raises(ValueError, match="a: 16 of 24 elements"):
        stored.read("a")
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", {"a": whole[:, 2:4]}, {"a": right})
    with Stored.of_checkpoint(tmp_path, "model") as stored:
        assert stored.shapes == {"a": (4, 6)}
        assert torch.equal(stored.read("a"), whole)
    with pytest.raises(FileNotFoundError):
        Stored.of_checkpoint(tmp_path, "critic")


def test_state_that_is_of_one_ranks_part_alone_is_refused(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, state_of_a_part) == [None, None]


def state_of_a_part(_: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    weight: Tensor = distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    unspread("weight/step", torch.tensor(3.0), weight)
    unspread("weight/exp_avg", weight, weight)
    with pytest.raises(UsageError, match="weight/scales is of this rank's part of a weight alone"):
        unspread("weight/scales", torch.ones(4), weight)
