"""The optimizer: which weights it decays, which go to Muon, its step by the formula, and the same bytes after a restart."""

from __future__ import annotations

import copy
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings
from services.config.training.optimizer import OptimizerSettings, ScheduleSettings
from services.wire.errors import UsageError
from tests.support.trajectories import grouped, random_trajectories
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.checkpoint import checkpoint
from trainer.memory.host_state import HostState
from trainer.model.learner import Learner
from trainer.model.optimizer import MuonWithAdamW, make_optimizer, outer_weights
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import train_batch
from trainer.sft.tiny_model import build_model

MUON = OptimizerSettings(kind="muon")
EIGHT_BITS = OptimizerSettings(state_bits=8)


@pytest.fixture(scope="module")
def fresh_model() -> Qwen3ForCausalLM:
    return build_model(seed=5, hidden_size=32, layers=1)


def alone(learner: Learner) -> Roles:
    return Roles(learner, AdvantageComputer(AdvantageSettings()))


def one_batch(roles: Roles, seed: int) -> None:
    settings = RunSettings(k=99, trainer=roles.learner.settings)
    train_batch(roles, settings, grouped(random_trajectories(seed, groups=2, size=3)), 1)


def stepped(model: Qwen3ForCausalLM, settings: TrainerSettings, gradient: float) -> dict[str, torch.Tensor]:
    """The weights after one step under a gradient that is `gradient` everywhere."""
    own = copy.deepcopy(model)
    optimizer = make_optimizer(own.parameters(), settings, settings.learning_rate, outer_weights(own))
    for parameter in own.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    return {name: parameter.detach() for name, parameter in own.named_parameters()}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("everything", [False, True])
def test_norms_and_biases_are_decayed_only_when_asked(
    fresh_model: Qwen3ForCausalLM, kind: str, everything: bool
) -> None:
    """Without a gradient a weight moves by its decay alone, w·(1 − rate·decay)."""
    chosen = OptimizerSettings.model_validate({"kind": kind, "decay_norms_and_biases": everything})
    settings = TrainerSettings(learning_rate=0.1, weight_decay=0.5, optimizer=chosen)
    before = dict(fresh_model.named_parameters())
    flat = {name for name, weight in before.items() if weight.ndim == 1}
    assert flat
    for name, weight in stepped(fresh_model, settings, 0.0).items():
        kept = 1.0 if name in flat and not everything else 0.95
        torch.testing.assert_close(weight, before[name] * kept, rtol=1e-6, atol=0)


def test_epsilon_is_that_of_adamws_denominator(fresh_model: Qwen3ForCausalLM) -> None:
    """The first step is rate·g/(|g| + ε) whatever the betas: half of the rate where ε is |g|."""
    settings = TrainerSettings(learning_rate=0.1, optimizer=OptimizerSettings(epsilon=1e-3))
    before = dict(fresh_model.named_parameters())
    for name, weight in stepped(fresh_model, settings, 1e-3).items():
        torch.testing.assert_close(before[name] - weight, torch.full_like(weight, 0.05), rtol=1e-3, atol=1e-6)


def test_muon_gets_the_hidden_matrices_and_adamw_the_rest(fresh_model: Qwen3ForCausalLM) -> None:
    learner = Learner(copy.deepcopy(fresh_model), TrainerSettings(optimizer=MUON))
    one_batch(alone(learner), 1)
    fields = {name: set(learner.optimizer.state[weight]) for name, weight in learner.model.named_parameters()}
    of_muon = {name for name, kept in fields.items() if kept == {"momentum_buffer"}}
    assert of_muon == {name for name in fields if name.endswith("_proj.weight")}
    assert of_muon
    assert all(kept == {"step", "exp_avg", "exp_avg_sq"} for name, kept in fields.items() if name not in of_muon)
    assert {group["lr"] for group in learner.optimizer.param_groups} == {learner.learning_rate(0)}


def test_a_step_of_muon_is_orthogonal_and_as_large_as_one_of_adamw() -> None:
    """Newton-Schulz leaves singular values near 1; the scale 0.2·√max(rows, columns) makes its root mean square 0.2."""
    torch.manual_seed(1)
    weight, other = nn.Parameter(torch.zeros(48, 16)), nn.Parameter(torch.zeros(16))
    weight.grad, other.grad = torch.randn(48, 16), torch.ones(16)
    make_optimizer([weight, other], TrainerSettings(optimizer=MUON), 0.01).step()
    update = weight.detach()
    values = torch.linalg.svdvals(update / (0.01 * 0.2 * 48**0.5))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2 * 0.01, rel=0.2)
    torch.testing.assert_close(other.detach(), torch.full((16,), -0.01), rtol=1e-4, atol=0)


def test_muon_without_a_hidden_matrix_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(UsageError, match="no two-dimensional weights but embeddings and heads"):
        make_optimizer([weight], TrainerSettings(optimizer=MUON), 0.01, [weight])


@pytest.mark.parametrize(("kind", "bits"), [("adamw", 32), ("muon", 32), ("adamw", 8)])
def test_a_restored_trainer_goes_on_with_the_same_bytes(tmp_path: Path, kind: str, bits: int) -> None:
    """Policy and critic, with a decay that has other weights in a group of their own."""
    optimizer = OptimizerSettings.model_validate({"kind": kind, "state_bits": bits})
    trainer = TrainerSettings(
        optimizer=optimizer,
        weight_decay=0.1,
        schedule=ScheduleSettings(kind="cosine"),
        advantage=AdvantageSettings(estimator="gae"),
    )
    settings = RunSettings(k=99, trainer=trainer, steps=12)
    roles, restored = (make_roles(lambda: build_model(seed=5, hidden_size=64, layers=1), settings, 0) for _ in range(2))
    for seed in (1, 2):
        train_batch(roles, settings, grouped(random_trajectories(seed, groups=2, size=3)), 1)
    checkpoint.save(tmp_path, checkpoint.snapshot(roles, "r", "f"))
    assert checkpoint.restore_newest(tmp_path, restored, "r") == 2
    kept = {tensor.dtype for state in restored.learner.optimizer.state.values() for tensor in state.values()}
    assert (torch.uint8 in kept) == (bits == 8)
    for each in (roles, restored):
        train_batch(each, settings, grouped(random_trajectories(3, groups=2, size=3)), 1)
    for name, (model, _) in roles.models().items():
        again = restored.models()[name][0].state_dict()
        assert all(torch.equal(weight, again[key]) for key, weight in model.state_dict().items()), name


def test_torchs_own_state_dict_holds_both_parts(fresh_model: Qwen3ForCausalLM) -> None:
    """As tools of torch save and load it."""
    first, second = (Learner(copy.deepcopy(fresh_model), TrainerSettings(optimizer=MUON)) for _ in range(2))
    one_batch(alone(first), 1)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.version = first.version
    for learner in (first, second):
        one_batch(alone(learner), 2)
    assert all(torch.equal(weight, second.weights()[name]) for name, weight in first.weights().items())


def test_a_schedule_that_needs_the_runs_length_is_refused_without_one(fresh_model: Qwen3ForCausalLM) -> None:
    settings = TrainerSettings(schedule=ScheduleSettings(kind="linear"))
    with pytest.raises(UsageError, match="schedule linear needs the run's number of steps"):
        Learner(copy.deepcopy(fresh_model), settings)
    learner = Learner(copy.deepcopy(fresh_model), settings, run_steps=105)
    rates = [learner.learning_rate(version) / settings.learning_rate for version in (0, 4, 5, 55, 105)]
    assert rates == pytest.approx([0.2, 1.0, 1.0, 0.5, 0.0])


class Counted:
    """Copies for a device, and how many bytes of them live at a time."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def to_device(self, held: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        copied = held.clone()
        self._count(copied.nbytes)
        weakref.finalize(copied, self._count, -copied.nbytes)
        return copied

    def to_host(self, tensor: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
        return tensor.clone() if held is None else held.copy_(tensor)

    def _count(self, nbytes: int) -> None:
        self.held += nbytes
        self.most = max(self.most, self.held)


def test_moments_in_8_bits_take_a_quarter_and_step_as_those_of_32_do() -> None:
    """A quarter of the memory and a scale for 256 values; a step differs by the rounding of codes, 2 % on average."""
    torch.manual_seed(2)
    first = torch.randn(64, 128)
    ends = {}
    for bits in (32, 8):
        weight, small = nn.Parameter(first.clone()), nn.Parameter(torch.ones(8))
        chosen = OptimizerSettings.model_validate({"state_bits": bits})
        optimizer = make_optimizer([weight, small], TrainerSettings(optimizer=chosen, weight_decay=0.1), 1e-2)
        generator = torch.Generator().manual_seed(3)
        for _ in range(10):
            weight.grad = torch.randn(64, 128, generator=generator) + 0.3
            small.grad = torch.ones(8)
            optimizer.step()
        ends[bits] = weight.detach(), small.detach(), optimizer.state[weight]
    moved = (ends[32][0] - first).norm()
    assert 0 < float((ends[8][0] - ends[32][0]).norm() / moved) < 0.02
    torch.testing.assert_close(ends[8][1], ends[32][1], rtol=1e-6, atol=0)
    size = {
        bits: sum(tensor.nbytes for name, tensor in state.items() if name != "step")
        for bits, (*_, state) in ends.items()
    }
    assert size[8] == size[32] / 4 + 2 * 64 * 128 // 256 * 4


def test_without_bitsandbytes_a_run_with_8_bits_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UsageError, match="needs bitsandbytes, which is not installed") as raised:
        make_optimizer([nn.Parameter(torch.zeros(4))], TrainerSettings(optimizer=EIGHT_BITS), 0.01)
    assert raised.value.remedy.startswith("./dev install '.[adam8bit]' in a checkout")


@pytest.mark.parametrize(("kind", "bits"), [("adamw", 32), ("muon", 32), ("adamw", 8)])
def test_state_in_host_memory_gives_the_same_bytes_and_little_of_it_is_on_the_device(
    fresh_model: Qwen3ForCausalLM, kind: str, bits: int
) -> None:
    optimizer_settings = OptimizerSettings.model_validate({"kind": kind, "state_bits": bits})
    settings = TrainerSettings(optimizer=optimizer_settings, weight_decay=0.1)
    ends, places = [], Counted()
    for offloaded in (False, True):
        model = copy.deepcopy(fresh_model)
        optimizer = make_optimizer(model.parameters(), settings, 1e-2, outer_weights(model))
        if offloaded and isinstance(optimizer, MuonWithAdamW):
            optimizer = MuonWithAdamW([HostState(part, places, 8192) for part in optimizer.parts])
        elif offloaded:
            optimizer = HostState(optimizer, places, 8192)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
            optimizer.step()
        state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        ends.append((dict(model.named_parameters()), state))
    (weights, state), (found, kept) = ends
    for name, weight in weights.items():
        assert torch.equal(found[name], weight)
        assert kept[name].keys() == state[name].keys()
        assert all(torch.equal(kept[name][key], value) for key, value in state[name].items())
    largest = max(weight.nbytes for weight in weights.values())
    assert places.held == 0 < places.most <= 2 * max(8192, largest) + 64


def test_an_offload_without_a_gpu_is_refused(fresh_model: Qwen3ForCausalLM) -> None:
    with pytest.raises(UsageError, match=r"optimizer\.offload without a GPU has no effect"):
        Learner(copy.deepcopy(fresh_model), TrainerSettings(optimizer=OptimizerSettings(offload=True)))
