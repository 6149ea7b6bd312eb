"""The plan of a step's memory: fake tensors against real ones, the formula against the plan, the command."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from typer.testing import CliRunner

from benchmarks.trainer.plan_cases import Case, sized
from benchmarks.trainer.planned import by_formula, config_of, predicted, settings_of
from services.policies.training.memory import estimate
from services.policies.training.model_shape import shape_of
from services.wire.errors import UsageError
from trainer.memory.options import Machine, machine_of, options_of
from trainer.memory.tracker import Event, Tracker
from trainer.model.roles import make_roles
from trainer.planning.cli import app, read_gpus
from trainer.planning.fake_run import Plan, run_fake
from trainer.planning.refusal import refuse_what_cannot_fit
from trainer.planning.step import full_batch, run_step
from trainer.planning.timeline import moments, tightest

DOCUMENT = Path(__file__).parents[3] / "docs/memory.md"
TOKENS = "trainer.micro_batch_tokens=256"
SMALL = sized(64, 3, (4, 2, 16), 192, 512)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_storage_is_counted_from_its_birth_to_its_death() -> None:
    with Tracker() as tracker:
        tracker.where = "first"
        made = torch.zeros(1000)
        view = made[10:]
        tracker.where = "second"
        del made
        other = torch.zeros(10)
        del view
    assert [(event.nbytes, event.where) for event in tracker.events] == [
        (4000, "first"),
        (40, "second"),
        (-4000, "second"),
    ]
    del other


def test_what_a_forward_pass_leaves_behind_is_an_activation() -> None:
    events = [
        Event(1, 100, ""),
        Event(2, 10, "forward, layer 1 of 1"),
        Event(3, 50, "forward, layer 1 of 1"),
        Event(3, -50, "forward, layer 1 of 1"),
        Event(4, 30, "head"),
        Event(5, 7, "backward, layer 1 of 1"),
        Event(2, -10, "backward, layer 1 of 1"),
    ]
    found = {moment.where: dict(moment.parts) for moment in moments(events, {1: "weights"})}
    assert found["forward, layer 1 of 1"] == {"weights": 100, "activations": 10, "temporaries": 50}
    assert found["head"] == {"weights": 100, "activations": 10, "head": 30}
    assert tightest(events, {1: "weights"}).where == "forward, layer 1 of 1"


def _real(case: Case) -> int:
    """The most bytes that tensors hold in the same steps with real ones."""
    settings, config = settings_of(case), config_of(case)
    tracker = Tracker(
        summed={torch.Size((config.vocab_size, config.hidden_size))} if config.tie_word_embeddings else ()
    )

    def load() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model

    with tracker:
        roles = make_roles(load, settings, 0)
        tracker.add(roles.learner.model.parameters())
        batches = [full_batch(roles, settings.trainer.micro_batch_tokens, passes=passes) for passes in (1, 2)]
        since = 0
        for batch in batches:
            since = len(tracker.events)
            run_step(roles, batch)
    return tightest(tracker.events, {}, since).total


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        pytest.param(["trainer.activation_checkpointing=full"], marks=pytest.mark.slow),
        ["trainer.activation_checkpointing=selective", "trainer.dtype=bfloat16"],
        pytest.param(["trainer.lora.rank=4"], marks=pytest.mark.slow),
        ["trainer.advantage.estimator=gae", "trainer.loss.kl=0.1"],
    ],
    ids=["plain", "full", "selective, bfloat16", "adapters", "critic and reference"],
)
def test_fake_tensors_take_what_real_ones_take(overrides: list[str], one_thread: None) -> None:
    case = Case("small", SMALL, [TOKENS, *overrides])
    assert predicted(case).tightest.total == pytest.approx(_real(case), rel=0.02)


def _plan(**changed: Any) -> tuple[Case, Plan]:
    overrides = [TOKENS, *changed.pop("overrides", [])]
    case = Case(
        "shape",
        sized(**{"hidden": 128, "layers": 4, "heads": (4, 2, 32), "feed_forward": 384, "vocabulary": 1024} | changed),
        overrides,
    )
    return case, predicted(case)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"tied": True, "vocabulary": 16_384},
        pytest.param({"kind": "llama", "overrides": ["trainer.dtype=bfloat16"]}, marks=pytest.mark.slow),
        pytest.param({"overrides": ["trainer.activation_checkpointing=full"]}, marks=pytest.mark.slow),
        {"overrides": ["trainer.activation_checkpointing=full", "trainer.advantage.estimator=gae"]},
        {"overrides": ["trainer.lora.rank=8"]},
    ],
    ids=["plain", "tied", "llama, bfloat16", "full", "full, critic", "adapters"],
)
def test_the_formula_says_what_the_fake_run_finds(changed: dict[str, Any]) -> None:
    case, plan = _plan(**changed)
    assert by_formula(case) == pytest.approx(plan.tightest.total, rel=0.1)


HALF = ["trainer.activation_checkpointing=full", "trainer.dtype=bfloat16"]


@pytest.mark.parametrize("overrides", [[], pytest.param(HALF, marks=pytest.mark.slow)], ids=["plain", "full, bfloat16"])
def test_ranks_share_what_is_always_there(overrides: list[str]) -> None:
    case = Case("ranks", sized(128, 6, (4, 2, 32), 384, 2048), [TOKENS, *overrides])
    settings, alone = settings_of(case), predicted(case).tightest.parts
    options = options_of(settings, Machine(4))
    plan = run_fake(config_of(case), settings, options)
    parts = plan.tightest.parts
    for part in ("weights", "optimizer"):
        assert parts[part] == pytest.approx(alone[part] / 4, rel=0.01)
    layer = max(moment.parts["gathered"] for moment in plan.moments if "layer" in moment.where)
    # Embedding and head all along, some layers: never the whole model.
    assert 4 * 2 * 2048 * 128 < layer < alone["weights"] + 4 * 2048 * 128
    assert estimate(shape_of(case.configuration), options).total == pytest.approx(plan.tightest.total, rel=0.1)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["trainer.activation_checkpointing=full"]])
@pytest.mark.parametrize("machine", [Machine(2), Machine(2, 80 << 30)], ids=["CPUs", "GPUs"])
def test_layers_that_stay_collected_are_planned(machine: Machine, overrides: list[str]) -> None:
    shape = sized(128, 12, (4, 2, 32), 384, 512)
    small, both = shape_of(shape), []
    for reshard in ("true", "false"):
        case = Case("ranks", shape, [TOKENS, *overrides, f"trainer.parallel.reshard_after_forward={reshard}"], 2)
        both.append(predicted(case, machine))
        assert by_formula(case, machine) == pytest.approx(both[-1].tightest.total, rel=0.1)
    before, after = (each.tightest.parts for each in both)
    # All layers, but for up to three that are there anyway.
    assert 4 * 9 * small.layer <= after["gathered"] - before["gathered"] <= 4 * 12 * small.layer
    assert after.get("exchange") == (None if machine.gpu else 4 * 4 * small.layer)


@pytest.mark.parametrize(
    ("overrides", "models"),
    [([], 1), pytest.param(["trainer.advantage.estimator=gae", "trainer.loss.kl=0.1"], 3, marks=pytest.mark.slow)],
    ids=["policy", "critic and reference"],
)
def test_what_ranks_of_one_machine_exchange_through_is_planned(overrides: list[str], models: int) -> None:
    """16 MiB are more than a layer has: two results and a slot for each of four ranks, of a layer each."""
    shape = sized(128, 2, (4, 2, 32), 384, 512)
    case = Case("ranks", shape, [TOKENS, *overrides], 4)
    parts = predicted(case).tightest.parts
    wanted = models * 6 * 4 * shape_of(shape).layer
    assert parts["exchange"] == pytest.approx(wanted, rel=0.01)
    assert estimate(shape_of(shape), options_of(settings_of(case), Machine(4))).parts["exchange"] == pytest.approx(
        wanted, rel=0.01
    )


@pytest.mark.parametrize(
    ("context", "tied"),
    [(1, False), pytest.param(2, True, marks=pytest.mark.slow)],
    ids=["tensor", "tensor and context"],
)
def test_tensor_and_context_ranks_are_planned(context: int, tied: bool) -> None:
    overrides = ["trainer.parallel.tensor=2", f"trainer.parallel.context={context}"]
    case = Case("ranks", sized(128, 2, (4, 2, 32), 384, 2048, tied=tied), [TOKENS, *overrides], 2 * context)
    plan, whole = (predicted(each).tightest.parts for each in (case, Case("alone", case.configuration, [TOKENS])))
    # Norms, and an embedding that is no head, are whole; what context ranks share of weights, data ranks would.
    assert 0.49 / context < plan["weights"] / whole["weights"] < (0.75 if context == 1 else 0.26)
    assert plan["activations"] < 0.8 / context * whole["activations"]
    assert by_formula(case) == pytest.approx(sum(plan.values()), rel=0.05)
    assert not torch.distributed.is_initialized()


MIXTURE = sized(
    64, 2, (4, 2, 16), 192, 512, kind="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
)


def test_experts_are_planned() -> None:
    case = Case("experts", MIXTURE, [TOKENS])
    assert by_formula(case) == pytest.approx(predicted(case).tightest.total, rel=0.1)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"expert": 2}),
        pytest.param(4, {"expert": 2, "context": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"expert": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"expert": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=["data", "data, context", "tensor", "tensor, data"],
)
def test_ranks_that_split_experts_are_planned(ranks: int, layout: dict[str, int]) -> None:
    """Experts are most of this model, so that what is said of them shows."""
    shape = {**MIXTURE, "num_experts": 16, "moe_intermediate_size": 64}
    parallel = [f"trainer.parallel.{name}={size}" for name, size in layout.items()]
    case = Case("ranks", shape, [TOKENS, *parallel], ranks)
    plan, alone = predicted(case), predicted(Case("alone", shape, [TOKENS]))
    parts = plan.tightest.parts
    # Each rank holds its share of everything; tensor ranks have embedding, norms and routers whole.
    assert parts["weights"] / alone.tightest.parts["weights"] == pytest.approx(1 / ranks, abs=0.06)
    assert parts["optimizer"] == pytest.approx(2 * parts["weights"], rel=0.01)
    assert by_formula(case) == pytest.approx(plan.tightest.total, rel=0.1)
    assert any("as many tokens" in said for said in plan.assumed)
    # A layer's weights are collected without the experts of other ranks.
    # As GPUs do: others collect a part of it in what they share.
    alike = ["trainer.dtype=float32", "trainer.parallel.reshard_after_forward=true"]
    plans = [
        predicted(Case("ranks", shape, [TOKENS, *alike, *split], ranks), Machine(ranks, 80 << 30))
        for split in (parallel, [])
    ]
    most = [max(moment.parts.get("gathered", 0) for moment in each.moments) for each in plans]
    assert most[0] < 0.8 * most[1]
    assert not torch.distributed.is_initialized()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config: PretrainedConfig = config_of(Case("small", SMALL))
    config.save_pretrained(tmp_path)
    return tmp_path


def run(folder: Path, *words: str) -> dict[str, Any]:
    found = CliRunner().invoke(app, ["--model", str(folder), "--json", *words])
    assert found.exit_code == 0, found.output
    said: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return said


def test_the_command_says_the_peak_by_part(folder: Path) -> None:
    said = run(folder, TOKENS)
    parts = said["peak"]["parts"]
    assert sum(parts.values()) == said["peak"]["bytes"] == max(moment["bytes"] for moment in said["moments"])
    assert parts["weights"] == pytest.approx(4 * said["parameters"], rel=0.01)
    assert parts["optimizer"] == pytest.approx(2 * parts["gradients"], rel=0.01)
    assert said["fits"] is None and said["formula_bytes"] == pytest.approx(said["peak"]["bytes"], rel=0.1)
    shown = CliRunner().invoke(app, ["--model", str(folder), "--quick", TOKENS])
    assert "by the formula" in shown.stdout and "publishing" in shown.stdout


def test_a_gpu_of_a_stated_size_is_judged(folder: Path) -> None:
    assert run(folder, "--quick", "--gpus", "1x80")["fits"]
    assert not run(folder, "--quick", "--gpus", "1x0.001")["fits"]
    offloaded = run(folder, "--gpus", "1x80", "trainer.optimizer.offload=true", TOKENS)
    assert "optimizer" not in offloaded["peak"]["parts"] and offloaded["host"]["optimizer"] and offloaded["assumed"]


def test_a_fit_is_lines_that_the_settings_take(folder: Path) -> None:
    said = run(folder, "--fit", "--gpus", "1x0.6", "--quick")
    assert said["fits"] and said["settings"]
    again = run(
        folder, "--quick", "--gpus", "1x0.6", *(line.replace(" ", "").replace('"', "") for line in said["settings"])
    )
    assert again["formula_bytes"] == said["formula_bytes"]
    found = CliRunner().invoke(app, ["--model", str(folder), "--fit", "--quick", "--gpus", "1x0.0001"])
    assert isinstance(found.exception, UsageError) and "nothing fits" in str(found.exception)


def test_documented_commands_work(folder: Path) -> None:
    """Each line of docs/memory.md, of this model and by the formula alone."""
    lines = re.findall(r"^\$ rollmesh memory (.*)$", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        words = [str(folder) if word == "models/mine" else word for word in shlex.split(line)]
        found = CliRunner().invoke(app, [*words, "--quick"])
        assert found.exit_code == 0, (line, found.exception)


def test_gpus_are_written_as_a_number_and_gib() -> None:
    assert read_gpus("8x80") == (8, 80 << 30)
    for wrong in ("8", "x80", "0x80", "8x0", "8x80GB"):
        with pytest.raises(UsageError):
            read_gpus(wrong)


def test_what_ranks_do_not_train_is_not_planned(folder: Path) -> None:
    words = ["--model", str(folder), "--gpus", "2x80", "--quick"]
    assert CliRunner().invoke(app, [*words, "trainer.lora.rank=4"]).exit_code == 0
    for setting in ("trainer.optimizer.kind=muon", "trainer.optimizer.state_bits=8"):
        found = CliRunner().invoke(app, [*words, setting])
        assert isinstance(found.exception, UsageError) and f"{setting} does not go with" in str(found.exception)


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_one_rank_has_nothing_to_reshard(folder: Path, reshard: str) -> None:
    setting = f"trainer.parallel.reshard_after_forward={reshard}"
    assert run(folder, "--gpus", "2x80", "--quick", setting)["reshard_after_forward"] == (reshard == "true")
    told = CliRunner().invoke(app, ["--model", str(folder), "--gpus", "2x80", "--quick", setting]).stdout
    assert ("twice a pass" in told, "from a forward to its backward" in told) == (reshard == "true", reshard == "false")
    found = CliRunner().invoke(app, ["--model", str(folder), "--quick", setting])
    assert isinstance(found.exception, UsageError) and f"{setting} would have no effect" in str(found.exception)


def test_a_run_that_cannot_fit_is_refused_with_the_sum(folder: Path) -> None:
    settings = settings_of(Case("small", SMALL, [TOKENS]))
    refuse_what_cannot_fit(folder, settings, Machine(1, 80 << 30))
    refuse_what_cannot_fit(folder, settings, machine_of(torch.device("cpu")))
    with pytest.raises(UsageError, match=r"takes about .* GiB, and a GPU has 0\.0 \(\w+: .*optimizer") as refused:
        refuse_what_cannot_fit(folder, settings, Machine(1, 1 << 20))
    assert "rollmesh memory --fit" in refused.value.remedy
