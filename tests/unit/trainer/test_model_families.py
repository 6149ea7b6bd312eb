"""A folder of each family is loaded, trained, published and exported as the trainer does it, with rows beyond a window."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen2_5_VLConfig

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import LossSettings
from services.policies.batching import Group
from services.wire.errors import NoModelError, UsageError
from services.wire.trajectory import Trajectory
from tests.support.model_families import FAMILIES, VOCABULARY, WINDOW, make_family, table
from tests.support.trajectories import a_rollout, a_segment, grouped
from trainer.algorithms.describe import describe_loss
from trainer.checkpoint.model_folder import load_policy, save_final
from trainer.data.packing import micro_batch, pack
from trainer.data.rows import rows_of
from trainer.model.forward import PackedForward
from trainer.model.learner import Learner, named_weights
from trainer.model.logprobs import sampled_terms
from trainer.model.roles import make_roles
from trainer.model.routers import RouterLoss
from weight_bus.manifest.published import PublishedNames, check_folder
from weight_bus.publisher.contiguous import lay_contiguous

DOCUMENT = Path(__file__).parents[3] / "docs/models.md"
BALANCED = ("Qwen3-MoE", "Qwen2-MoE", "Mixtral", "Phi-3.5-MoE", "gpt-oss", "Qwen3-Next")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def a_folder(family: str, where: Path) -> Path:
    make_family(family).save_pretrained(where / "model")
    return where / "model"


def a_batch(*, rewards: tuple[float, ...] = (0.0, 1.0, 0.0)) -> list[Group[Trajectory]]:
    """Two groups of siblings, whose rows are longer than a window and than two of them."""
    numbers, made = np.random.default_rng(3), []
    for name in ("a", "b"):
        prompt = numbers.integers(2, VOCABULARY - 4, 9).tolist()
        for member, reward in enumerate(rewards):
            answer = numbers.integers(2, VOCABULARY - 4, 6 + 8 * member).tolist()
            segment = a_segment(prompt, answer, [-4.1] * len(answer), [0] * len(answer))
            made.append(a_rollout([segment], reward, group=name, size=len(rewards), member=member))
    return grouped(made)


def longest(groups: list[Group[Trajectory]]) -> int:
    return max(len(each.payload.segments[0].loss_mask) for group in groups for each in group.members)


def alone(model: PreTrainedModel, groups: list[Group[Trajectory]]) -> Tensor:
    """Logprobs of the sampled tokens, each trajectory in a pass of its own, by the model's own attention."""
    found = []
    for member in (member for group in groups for member in group.members):
        ids = torch.frombuffer(bytearray(member.payload.segments[0].token_ids), dtype=torch.int32).long()
        said = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0], -1)
        found.append(said[:-1].gather(1, ids[1:, None])[8:, 0])
    return torch.cat(found)


def test_a_folder_is_trained_published_and_exported(family: str, tmp_path: Path) -> None:
    folder, groups = a_folder(family, tmp_path), a_batch()
    assert longest(groups) > 2 * WINDOW
    stored = load_file(folder / "model.safetensors")
    learner = Learner(load_policy(folder), TrainerSettings(learning_rate=1e-2, warmup_steps=0))
    weights = learner.weights()
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())
    held = {tensor.untyped_storage().data_ptr() for tensor in learner.model.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in weights.values()} <= held, "no second copy"
    check_folder(folder, weights)

    # As the trainer does: the views follow the weights to where they are moved.
    assert lay_contiguous(learner.model.state_dict(keep_vars=True))
    for _ in range(3):
        rows, tally = rows_of(groups, learner.version, 2)
        learner.step(pack(rows, tally, 4096))
    moved = {name for name, tensor in learner.weights().items() if not torch.equal(tensor, stored[name])}
    beside_text = re.compile("vision_tower|multi_modal_projector")
    # An expert that no token chose has no gradient.
    assert {name for name in stored if not beside_text.search(name) and "experts." not in name} <= moved
    assert not any(beside_text.search(name) for name in moved)
    assert ("MoE" not in family) or any("experts." in name for name in moved)

    exported = save_final(tmp_path, learner.model, folder)
    written, again = load_file(exported / "model.safetensors"), load_policy(exported)
    published = learner.weights()
    assert written.keys() == published.keys() == Learner(again, TrainerSettings()).weights().keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in written.items())
    ids = torch.arange(2, 32)[None]
    with torch.no_grad():
        before, after = (model(input_ids=ids, use_cache=False).logits for model in (learner.model, again))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * float(before.abs().max()))


def test_rows_beyond_the_window_agree_with_the_model_alone(family: str) -> None:
    model, groups = make_family(family), a_batch()
    reference, packed = copy.deepcopy(model), PackedForward(model)
    rows, _ = rows_of(groups, 0, 0)
    micro = micro_batch(rows)
    found, wanted = sampled_terms(packed, micro)[0], alone(reference, groups)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weighing = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (found * weighing).sum().backward()  # type: ignore[no-untyped-call]
    (wanted * weighing).sum().backward()  # type: ignore[no-untyped-call]
    grads = [(weight.grad, of.grad) for weight, of in zip(model.parameters(), reference.parameters(), strict=True)]
    largest = max(float(of.abs().max()) for _, of in grads if of is not None)
    for grad, of in grads:
        assert (grad is None) == (of is None)
        if grad is not None:
            torch.testing.assert_close(grad, of, rtol=1e-4, atol=1e-5 * largest)


def test_trying_leaves_the_model_as_it_was(family: str) -> None:
    """Its window too: an ordinary call sees as far as before."""
    model = make_family(family)
    before, ids = copy.deepcopy(model), torch.arange(2, 32)[None]
    PackedForward(model)
    assert model.config.to_dict() == before.config.to_dict()
    with torch.no_grad():
        found, wanted = (each(input_ids=ids, use_cache=False).logits for each in (model, before))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_a_window_that_is_read_elsewhere_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model's own results do not follow the window, short rows prove nothing: each row is computed apart."""
    model = make_family("Mistral")
    config = type(model.config)
    seen = property(lambda self: WINDOW, lambda self, value: None)
    monkeypatch.setattr(config, "sliding_window", seen)
    assert PackedForward(model).separation == "apart"


def test_positions_that_depend_on_the_longest_row_are_computed_apart() -> None:
    model = make_family("Llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert PackedForward(model).separation == "apart"


def test_what_no_text_goes_through_is_not_trained(tmp_path: Path) -> None:
    """Nor moved by weight decay."""
    model = load_policy(a_folder("Gemma 3", tmp_path))
    learner = Learner(model, TrainerSettings(weight_decay=0.5, warmup_steps=0))
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    rows, tally = rows_of(a_batch(), 0, 0)
    learner.step(pack(rows, tally, 4096))
    still = {name for name, weight in learner.weights().items() if torch.equal(weight, before[name])}
    assert still == {name for name in before if name.startswith(("vision_tower", "multi_modal_projector"))} != set()


def test_a_model_without_a_language_head_is_refused_by_name(tmp_path: Path) -> None:
    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(NoModelError, match=r"no causal language model .*Qwen2_5_VLConfig"):
        load_policy(tmp_path)


@pytest.mark.parametrize("family", BALANCED)
def test_the_balance_of_experts_is_the_familys_own(family: str) -> None:
    model = make_family(family)
    loss, ids = RouterLoss(model), torch.arange(2, 32)[None]
    wanted = model(input_ids=ids, use_cache=False, output_router_logits=True).aux_loss
    with loss.recording():
        model(input_ids=ids, use_cache=False)
    model(input_ids=ids + 1, use_cache=False)
    torch.testing.assert_close(loss.value(), wanted)


def test_experts_are_balanced_by_switch_alone() -> None:
    """A batch without a signal moves the routers where the loss asks for balance, and nothing where it does not."""

    def moved(coefficient: float) -> set[str]:
        settings = TrainerSettings(warmup_steps=0, loss=LossSettings(router_aux=coefficient))
        learner = make_roles(lambda: make_family("Qwen3-MoE"), RunSettings(trainer=settings), 0).learner
        before = {name: weight.clone() for name, weight in learner.weights().items()}
        rows, tally = rows_of(a_batch(rewards=(1.0, 1.0)), 0, 0, skip_idle=learner.objective.idle_at_zero)
        learner.step(pack(rows, tally, 40))
        return {name for name, weight in learner.weights().items() if not torch.equal(weight, before[name])}

    assert not moved(0.0)
    assert {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)} <= moved(0.1)
    assert "0.1·ℓ_experts" in describe_loss(LossSettings(router_aux=0.1))


def test_balance_without_experts_is_refused() -> None:
    with pytest.raises(UsageError, match="a llama model balances no experts"):
        Learner(make_family("Llama"), TrainerSettings(loss=LossSettings(router_aux=0.1)))


def test_a_folder_with_other_tensors_is_refused_by_name(tmp_path: Path) -> None:
    folder = a_folder("Qwen3-MoE", tmp_path)
    model = load_policy(folder)
    weights = named_weights(model)
    published = PublishedNames(model, weights).views(weights)
    with pytest.raises(UsageError, match=r"mlp\.experts\.gate_up_proj \[4, 32, 32\] would be .* no such tensor"):
        check_folder(folder, weights)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    with pytest.raises(UsageError, match=re.escape(f"{name} [16, 31] would be published") + r".* one of \[16, 32\]"):
        check_folder(folder, published | {name: published[name][:, 1:]})
    check_folder(folder, {f"transformer.{name}": tensor for name, tensor in published.items()}, "transformer.")


def test_the_documented_table_is_what_the_code_makes_of_each_family() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- families -->\n(.*?)\n<!-- end of families -->", text, flags=re.DOTALL)
    documented, made = block.splitlines(), table()
    if made[-1].endswith("? |"):
        documented, made = ([line.rsplit("|", 2)[0] for line in lines] for lines in (documented, made))
    assert documented == made, "python -m tests.support.model_families prints it anew"
