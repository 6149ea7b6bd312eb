"""Compiled layers: the same gradients for rows of changing layout, without compiling anew for each."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

from services.config.settings import TrainerSettings
from services.wire.errors import UsageError
from tests.support.trajectories import grouped, random_trajectories
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model import compilation
from trainer.model.learner import Learner
from trainer.sft.tiny_model import build_model


def gradients(learner: Learner, seed: int) -> dict[str, torch.Tensor]:
    rows, tally = rows_of(grouped(random_trajectories(seed, groups=2 + seed, size=3)), 0, 9)
    batch = pack(rows, tally, 4096, learner.model.device, learner.stem_width)
    learner.gradient(batch, learner.proximals([batch])[0])
    found = {name: weight.grad.clone() for name, weight in learner.model.named_parameters() if weight.grad is not None}
    learner.forget_gradient()
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_layers_give_the_same_gradients_whatever_the_layout() -> None:
    base = build_model(seed=5, hidden_size=32, layers=2)
    plain = Learner(copy.deepcopy(base), TrainerSettings())
    settings = TrainerSettings(compile=True, activation_checkpointing="full")
    compiled = Learner(copy.deepcopy(base), settings)
    names = list(plain.weights())
    assert list(compiled.weights()) == names, "compiled layers keep their names"
    for seed in range(4):
        wanted, found = gradients(plain, seed), gradients(compiled, seed)
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * largest)
        if seed == 1:
            torch._dynamo.utils.counters.clear()
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"], "rows of another layout are no reason to compile"


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match="needs a C\\+\\+ compiler"):
        Learner(build_model(seed=5, hidden_size=32, layers=1), TrainerSettings(compile=True))
