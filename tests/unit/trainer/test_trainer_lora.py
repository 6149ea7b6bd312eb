"""LoRA: adapters alone are trained and kept; engines and the final folder get merged weights, by the names of the first."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from services.config.load import load_settings
from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, LossSettings
from services.config.training.lora import LoraSettings
from services.wire.errors import UsageError
from tests.support.forked_command import exit_code_of
from tests.support.model_families import make_family
from tests.support.rank_pool import RankPool
from tests.support.trajectories import grouped, random_trajectories
from trainer.algorithms.describe import describe
from trainer.checkpoint import checkpoint
from trainer.checkpoint.model_folder import load_policy, save_final
from trainer.checkpoint.recovery import fingerprint
from trainer.data.packing import MicroBatch, pack
from trainer.data.rows import rows_of
from trainer.model.adapters import Adapters
from trainer.model.forward import PackedForward
from trainer.model.learner import Learner, named_weights
from trainer.model.logprobs import Reference
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import train_batch
from trainer.sft.tiny_model import build_model, save_policy
from weight_bus.manifest.adapter import a_name, b_name
from weight_bus.manifest.computed import computed
from weight_bus.publisher.publisher import Publisher
from weight_bus.publisher.ranks import Ranks
from weight_bus.transports.shm import ShmExporter

IDS = torch.arange(2, 20)[None]


def settings(lora: dict[str, Any] | None = None, **trainer: Any) -> RunSettings:
    chosen = TrainerSettings(
        lora=LoraSettings.model_validate({"rank": 4} | (lora or {})), learning_rate=1e-2, **trainer
    )
    return RunSettings(k=100, trainer=chosen)


def roles_of(base: PreTrainedModel, run: RunSettings) -> Roles:
    return make_roles(lambda: copy.deepcopy(base), run, 0)


def train(roles: Roles, run: RunSettings, *seeds: int) -> None:
    for seed in seeds:
        train_batch(roles, run, grouped(random_trajectories(seed, groups=2, size=3)), 1)


def a_micro_batch(run: RunSettings) -> MicroBatch:
    rows, tally = rows_of(grouped(random_trajectories(9, groups=2, size=3)), 0, 100)
    return pack(rows, tally, run.trainer.micro_batch_tokens).micro_batches[0]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def base() -> Qwen3ForCausalLM:
    return build_model(seed=5, hidden_size=32, layers=2)


@pytest.fixture(scope="module")
def tied() -> Qwen3ForCausalLM:
    """Its head is its embedding, as in small models of many families."""
    config = copy.deepcopy(build_model(seed=5, hidden_size=32, layers=1).config)
    config.tie_word_embeddings = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return Qwen3ForCausalLM(config)


def test_a_run_begins_with_the_first_policy_itself(base: Qwen3ForCausalLM) -> None:
    roles = roles_of(base, settings())
    assert type(roles.learner.model) is type(base)
    assert roles.learner.separation == "within"
    with torch.no_grad():
        assert torch.equal(roles.learner.model(input_ids=IDS).logits, base.eval()(input_ids=IDS).logits)
    assert same(roles.learner.weights(), named_weights(base))


def test_only_adapters_are_trained_by_the_gradient_of_the_merged_weights(base: Qwen3ForCausalLM) -> None:
    """∂L/∂B = s·G·Aᵀ and ∂L/∂A = s·Bᵀ·G, with G = ∂L/∂W of a model that holds the merged weights."""
    run = settings(clip_grad_norm=1e9)
    roles = roles_of(base, run)
    train(roles, run, 1)
    learner = roles.learner
    trained = dict(learner.model.named_parameters())
    assert {id(parameter) for parameter in learner.optimizer.state} == {
        id(parameter) for name, parameter in trained.items() if ".lora_" in name
    }
    assert len(learner.optimizer.state) == 2 * 7 * 2

    whole = copy.deepcopy(base)
    whole.load_state_dict(learner.weights())
    rows, tally = rows_of(grouped(random_trajectories(2, groups=2, size=3)), 1, 100)
    batch = pack(rows, tally, run.trainer.micro_batch_tokens)
    for each in (learner, reference := Learner(whole, TrainerSettings(clip_grad_norm=1e9))):
        each.gradient(batch, [None] * len(batch.micro_batches))
    gradients = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
    scale = run.trainer.lora.alpha / run.trainer.lora.rank
    for name, parameter in trained.items():
        if ".lora_" not in name:
            assert parameter.grad is None and not parameter.requires_grad
            continue
        layer, _, matrix = name.removesuffix(".default.weight").rpartition(".lora_")
        gradient, other = gradients[f"{layer}.weight"], "A" if matrix == "B" else "B"
        factor = trained[f"{layer}.lora_{other}.default.weight"].detach()
        expected = gradient @ factor.T if matrix == "B" else factor.T @ gradient
        torch.testing.assert_close(parameter.grad, scale * expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "model.layers.1.mlp.down_proj"]])
@pytest.mark.parametrize("model", ["base", "tied"])
def test_what_is_published_is_what_peft_merges_and_the_exports_say_the_same(
    model: str, targets: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first: Qwen3ForCausalLM = request.getfixturevalue(model)
    if model == "tied" and targets != "all-linear":
        targets = ["v_proj"]
    save_policy(first, tmp_path / "base")
    run = settings({"targets": targets})
    roles = make_roles(lambda: load_policy(tmp_path / "base"), run, 0)
    train(roles, run, 1, 2, 3)
    learner = roles.learner
    published = learner.weights()
    before = named_weights(first)
    assert list(published) == list(before)
    moved = {name for name in before if not torch.equal(published[name], before[name])}
    asked = ["_proj.weight"] if targets == "all-linear" else [f"{target}.weight" for target in targets]
    assert moved == {name for name in before if name.endswith(tuple(asked))}

    final = save_final(tmp_path / "out", learner.model, tmp_path / "base", learner.adapters)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["final", "final-adapter"]
    merged = load_policy(final)
    assert same(named_weights(merged), published)
    adapted = PeftModel.from_pretrained(load_policy(tmp_path / "base"), tmp_path / "out" / "final-adapter")
    with torch.no_grad():
        found, expected, others = (each(input_ids=IDS).logits for each in (adapted, merged, first))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert float((found - others).abs().max()) > 1e-2
    by_peft = named_weights(adapted.merge_and_unload())
    assert by_peft.keys() == published.keys()
    for name, weight in published.items():
        torch.testing.assert_close(by_peft[name], weight, rtol=0, atol=1e-6)
    assert "lora" not in (final / "config.json").read_text()


def test_layers_that_hold_their_weights_turned_are_merged_so_too(tmp_path: Path) -> None:
    """GPT-2's linear layers are of class Conv1D."""
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=1, n_positions=64)
    first = GPT2LMHeadModel(config).eval()
    adapted = copy.deepcopy(first)
    adapters = Adapters(adapted, LoraSettings(rank=2, targets=["c_attn", "c_proj"]), 1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    adapters.save(tmp_path, tmp_path)
    by_peft = named_weights(PeftModel.from_pretrained(first, tmp_path).merge_and_unload())
    merged = {name: computed(tensor) for name, tensor in adapters.merged(named_weights(adapted)).items()}
    assert merged.keys() == by_peft.keys()
    for name, weight in by_peft.items():
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-6)


def test_adapters_published_alone_are_what_the_merged_weights_have_more_than_the_base(
    base: Qwen3ForCausalLM,
) -> None:
    run = settings({"targets": ["q_proj", "down_proj"], "alpha": 6})
    roles = roles_of(base, run)
    train(roles, run, 1)
    before, merged = named_weights(base), roles.learner.weights()
    roles.learner.publishes_adapters = True
    alone = {name: computed(tensor) for name, tensor in roles.learner.published().items()}
    modules = [name.removesuffix(".weight") for name in merged if name.endswith(("q_proj.weight", "down_proj.weight"))]
    assert alone.keys() == {name(module) for module in modules for name in (a_name, b_name)}
    for module in modules:
        more = alone[b_name(module)] @ alone[a_name(module)]
        assert float(more.abs().max()) > 0
        torch.testing.assert_close(merged[f"{module}.weight"], before[f"{module}.weight"] + more, rtol=0, atol=1e-6)
    assert same(roles.learner.weights(), merged), "exports are whole, whatever engines get"


def test_an_adapter_of_a_weight_that_lies_turned_is_not_published_alone() -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=1, n_positions=64)
    adapters = Adapters(GPT2LMHeadModel(config).eval(), LoraSettings(rank=2, targets=["c_attn"]), 1)
    with pytest.raises(UsageError, match=r"c_attn, a Conv1D, cannot be published alone: set weights\.publish=merged"):
        adapters.alone()


@pytest.mark.parametrize(("targets", "offered"), [(["q_proj"], True), ("all-linear", False)])
def test_weights_that_are_frozen_are_no_part_of_a_delta(
    base: Qwen3ForCausalLM, targets: Any, offered: bool, run_id: str
) -> None:
    run = settings({"targets": targets})
    roles = roles_of(base, run)
    publisher = Publisher(
        run_id, roles.learner.published(), "float32", ShmExporter(run_id), 1 << 20, delta_max_ratio=0.25
    )
    try:
        publisher.publish(0, roles.learner.published()).manifest()
        train(roles, run, 1)
        manifest = publisher.publish(1, roles.learner.published()).manifest()
    finally:
        publisher.close()
    assert (manifest.delta is not None) == offered
    if manifest.delta is not None:
        adapted = sum(weight.nbytes for name, weight in roles.learner.weights().items() if "q_proj" in name)
        assert manifest.delta.total_bytes < 1.1 * adapted < 0.1 * manifest.total_bytes


def test_the_reference_is_the_policy_with_its_adapters_off_and_no_second_model(base: Qwen3ForCausalLM) -> None:
    run = settings(loss=LossSettings(kl=0.1), advantage=AdvantageSettings(kl=0.05))
    loads = []

    def load() -> PreTrainedModel:
        loads.append(1)
        return copy.deepcopy(base)

    roles = make_roles(load, run, 0)
    assert len(loads) == 1
    untouched = Reference(PackedForward(copy.deepcopy(base).eval()))
    other = roles_of(base, run)
    other.learner.reference = untouched
    for each in (roles, other):
        train(each, run, 1, 2, 3)
    micro = a_micro_batch(run)
    reference = roles.learner.reference
    assert reference is not None
    with reference.within():
        assert torch.equal(reference.logprobs(micro), untouched.logprobs(micro))
    assert not torch.equal(Reference(PackedForward(roles.learner.model)).logprobs(micro), untouched.logprobs(micro))
    assert same(roles.learner.weights(), other.learner.weights()), "and steps are those of a reference beside it"


def test_a_restarted_trainer_makes_the_same_bytes_from_the_adapters_alone(
    base: Qwen3ForCausalLM, tmp_path: Path
) -> None:
    run = settings(loss=LossSettings(kl=0.1))
    roles = roles_of(base, run)
    train(roles, run, 1, 2)
    path = checkpoint.save(tmp_path, checkpoint.snapshot(roles, "r", "f"))
    kept = load_file(path / "model.safetensors")
    assert len(kept) == 28 and all(".lora_" in name for name in kept)
    state = load_file(path / "optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in state} == kept.keys()

    torch.rand(3)
    fresh = roles_of(base, run)
    assert checkpoint.restore_newest(tmp_path, fresh, "r") == 2
    again = roles_of(base, run)
    train(again, run, 1, 2)
    for each in (roles, fresh, again):
        train(each, run, 3)
    assert same(fresh.learner.weights(), roles.learner.weights())
    assert same(again.learner.weights(), roles.learner.weights()), "from the run's beginning, too"
    whole = RunSettings(k=100)
    for wrong in (whole, settings({"rank": 2})):
        with pytest.raises(checkpoint.MismatchError, match="other weights"):
            checkpoint.restore_newest(tmp_path, roles_of(base, wrong), "r")
    elsewhere = roles_of(base, run.model_copy(update={"seed": 2}))
    train(elsewhere, run, 1)
    assert not same(elsewhere.learner.weights(), roles.learner.weights())


def test_of_a_mixture_of_experts_the_linear_layers_get_adapters() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, head_dim=32, intermediate_size=32, **shape, **experts))
    before = list(named_weights(model))
    adapters = Adapters(model, LoraSettings(rank=2), 1)
    assert list(adapters.merged(named_weights(model))) == before
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * 4


def test_adapters_of_a_policy_in_bfloat16_are_in_float32() -> None:
    model = build_model(seed=5, hidden_size=32, layers=1).to(torch.bfloat16)
    learner = Learner(model, TrainerSettings(), adapters=Adapters(model, LoraSettings(rank=2), 1))
    trained = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
    assert len(trained) == 14 and all(parameter.dtype == torch.float32 for parameter in trained)
    assert {parameter.dtype for parameter in learner.model.parameters()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        (["q_prj"], "no module 'q_prj': name linear layers of it: down_proj, gate_proj, k_proj"),
        (["q_proj", "lm_head"], "'lm_head' is the language head, which gets no adapter"),
        (["embed_tokens"], "'embed_tokens' is of class Embedding"),
        (["mlp"], "'mlp' is of class Qwen3MLP"),
    ],
)
def test_targets_that_are_no_linear_layers_of_the_model_are_refused(
    base: Qwen3ForCausalLM, targets: list[str], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        roles_of(base, settings({"targets": targets}))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["trainer.lora.dropout=0.1"], "the ratio to the engine's policy must come from the weights alone"),
        (["trainer.lora.targets=q_proj"], r'a list of module names: \["q_proj", "v_proj"\]'),
        (["trainer.lora.targets=[]"], "all-linear, or a list"),
        (["trainer.lora.alpha=0"], "trainer.lora.alpha = 0"),
        (["trainer.lora.rank=-1"], "trainer.lora.rank = -1"),
        (["trainer.lora.alpha=8"], "lora.alpha=8 would have no effect under lora.rank=0"),
        (['trainer.lora.targets=["q_proj"]'], "lora.targets=.* would have no effect under lora.rank=0"),
    ],
)
def test_settings_without_effect_are_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        describe(load_settings(None, overrides).trainer)


def test_the_formula_and_the_fingerprint_tell_what_is_trained() -> None:
    assert "B·A" not in describe(TrainerSettings())
    plain, named = settings(), settings({"targets": ["q_proj", "v_proj"], "alpha": 6})
    assert describe(plain.trainer).endswith("W = W_0 + 8·B·A of rank 4 in all linear layers, all other weights frozen")
    assert "1.5·B·A of rank 4 in q_proj, v_proj" in describe(named.trainer)
    assert len({fingerprint(each) for each in (plain, named, settings({"rank": 5}), settings({"alpha": 8}))}) == 4


def test_a_folder_with_an_adapter_is_no_policy(base: Qwen3ForCausalLM, tmp_path: Path) -> None:
    save_policy(base, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds an adapter beside the weights"):
        load_policy(tmp_path)


def test_a_trainer_without_adapters_does_not_wait_for_peft() -> None:
    assert exit_code_of("import sys, trainer.model.roles; sys.exit('peft' in sys.modules)") == 0
    assert exit_code_of("import sys, peft; sys.exit('peft' in sys.modules)") == 1


def test_without_peft_a_run_with_adapters_says_what_to_install(
    base: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match="needs peft, which is not installed") as raised:
        roles_of(base, settings())
    assert raised.value.remedy.startswith("./dev install '.[lora]' in a checkout")


def test_layers_with_adapters_are_computed_once_more_with_the_same_gradient(base: Qwen3ForCausalLM) -> None:
    found = []
    for checkpointing in ("none", "full"):
        run = settings(activation_checkpointing=checkpointing)
        roles = roles_of(base, run)
        train(roles, run, 4)
        found.append(roles.learner.weights())
    assert same(*found) and not same(found[0], named_weights(base))


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Gemma 3", "gpt-oss"])
def test_a_family_with_adapters_is_published_and_exported_under_the_names_of_its_folder(
    family: str, tmp_path: Path
) -> None:
    """Experts fused in the model, an encoder of images beside it: neither gets an adapter."""
    make_family(family).save_pretrained(tmp_path / "model")
    first, run = load_file(tmp_path / "model/model.safetensors"), settings()
    roles = make_roles(lambda: load_policy(tmp_path / "model"), run, 0)
    learner = roles.learner
    assert same(learner.weights(), first)
    train(roles, run, 4)
    moved = {name for name, weight in learner.weights().items() if not torch.equal(weight, first[name])}
    assert any("q_proj" in name for name in moved) and not any(re.search("expert|vision|norm", name) for name in moved)
    exported = save_final(tmp_path, learner.model, tmp_path / "model", learner.adapters)
    assert same(load_file(exported / "model.safetensors"), learner.weights())
    ids = torch.arange(2, 32)[None]
    with torch.no_grad():
        again, trained = (
            model(input_ids=ids, use_cache=False).logits for model in (load_policy(exported), learner.model)
        )
    torch.testing.assert_close(again, trained, rtol=1e-4, atol=1e-4 * float(trained.abs().max()))


def published_by_ranks(_: int, run_id: str, alone: bool) -> tuple[str, str]:
    """The digest of merged weights, or of the adapters `alone`, as one process would publish them, and as ranks do that
    have a part of each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def adapted() -> tuple[Any, Adapters]:
        model = build_model(3, hidden_size=32, layers=2)
        adapters = Adapters(model, LoraSettings(rank=4), 1)
        torch.manual_seed(9)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        return model, adapters

    def published() -> Any:
        return adapters.alone() if alone else adapters.merged(named_weights(model))

    model, adapters = adapted()
    single = Publisher("alone", published(), "float32", ShmExporter("alone"), 4096)
    wanted = single.digest(1, published())
    single.close()
    model, adapters = adapted()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    ranks = Ranks(wait_s=120)
    parts = published()
    publisher = Publisher(run_id, parts, "float32", ShmExporter(run_id), 4096, ranks=ranks)
    found = publisher.publish(1, parts).manifest()
    owned = [sum(shard.nbytes for shard in owner.shards or ()) for owner in found.owners]
    assert max(owned) < 1.05 * min(owned)
    publisher.close()
    ranks.close()
    return wanted, found.root_digest


@pytest.mark.parametrize("alone", [False, True], ids=["merged", "alone"])
def test_ranks_publish_merged_weights_and_adapters_a_part_each(rank_pool: RankPool, run_id: str, alone: bool) -> None:
    for wanted, found in rank_pool.run(2, published_by_ranks, run_id, alone):
        assert found == wanted
