"""Several optimizer steps on one batch: whole groups, judged by the step that consumes them, one policy before them all."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from transformers import Qwen3ForCausalLM

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, CorrectionSettings, CostSettings, LossSettings
from services.policies.batching import Group
from services.policies.token_budget import split_rows
from services.wire.packed import unpack_tokens
from services.wire.trajectory import Trajectory
from tests.support.trajectories import a_rollout, a_segment, grouped, random_trajectories
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.data.packing import PackedBatch, micro_batch, pack
from trainer.data.rows import rows_of
from trainer.model.learner import Learner
from trainer.model.logprobs import token_logprobs
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import parts_of, prepare, train_batch, try_batch
from trainer.sft.tiny_model import build_model


@pytest.fixture(scope="module")
def fresh_model() -> Qwen3ForCausalLM:
    return build_model(seed=5, hidden_size=32, layers=1)


def roles_of(model: Qwen3ForCausalLM, settings: RunSettings) -> Roles:
    return Roles(Learner(copy.deepcopy(model), settings.trainer), AdvantageComputer(AdvantageSettings()))


def sampled_by(model: Qwen3ForCausalLM, trajectories: Sequence[Trajectory]) -> list[Group[Trajectory]]:
    """The same answers with the model's own logprobs, so that behaviour and proximal policy are one."""
    sampled = []
    for one in trajectories:
        (segment,) = one.segments
        ids = torch.from_numpy(unpack_tokens(segment.token_ids).astype("int64"))[None]
        start = segment.version_spans[0].start
        with torch.no_grad():
            logprobs = token_logprobs(model, ids, start)[0].tolist()
        tokens = ids[0].tolist()
        again = a_segment(tokens[:start], tokens[start:], logprobs, [0] * len(logprobs))
        group, size = (one.group_id, one.group_ordinal), one.group_size
        sampled.append(a_rollout([again], one.reward, group=group[0], ordinal=group[1], size=size, member=one.member))
    return grouped(sampled)


def test_parts_are_whole_groups_judged_by_their_own_step(fresh_model: Qwen3ForCausalLM) -> None:
    settings = RunSettings(k=2, trainer=TrainerSettings(minibatches_per_batch=3))
    roles, groups = roles_of(fresh_model, settings), grouped(random_trajectories(1, groups=6, size=3))
    trained = train_batch(roles, settings, groups, 3)
    assert [step.version for step in trained] == [1, 2, 3] and roles.learner.version == 3
    assert [group for step in trained for group in step.groups] == groups
    assert [len(step.groups) for step in trained] == [2, 2, 2]
    assert [dict(step.tally.histogram).keys() for step in trained] == [{0}, {1}, {2}]
    assert [step.learning_rate for step in trained] == [roles.learner.learning_rate(version) for version in range(3)]


def test_a_batch_that_was_prepared_ahead_gives_the_same_bytes(fresh_model: Qwen3ForCausalLM) -> None:
    settings = RunSettings(k=9, trainer=TrainerSettings(minibatches_per_batch=2, epochs_per_batch=2))
    first, second = (grouped(random_trajectories(seed, groups=4, size=3)) for seed in (1, 2))
    ends = []
    for when in ("ahead", "after", "for another version"):
        roles = roles_of(fresh_model, settings)
        assert roles.prepares_ahead
        prepared = prepare(roles, settings, second, 4, 4 if when == "ahead" else 3) if when != "after" else None
        steps = [*try_batch(roles, settings, first, 4).steps, *try_batch(roles, settings, second, 4, prepared).steps]
        assert [step.packed_ahead for step in steps] == [False] * 4 + [when == "ahead"] * 4
        ends.append((roles.learner.weights(), [(step.tally, step.statistics) for step in steps]))
    for weights, told in ends[1:]:
        assert told == ends[0][1]
        assert all(torch.equal(weight, weights[name]) for name, weight in ends[0][0].items())


def test_a_batch_waits_for_the_step_before_where_its_advantages_depend_on_it(fresh_model: Qwen3ForCausalLM) -> None:
    cost = AdvantageSettings(cost=CostSettings(component="length"))
    critic = AdvantageSettings(estimator="gae")
    for advantage in (cost, critic, AdvantageSettings(kl=0.1)):
        settings = RunSettings(trainer=TrainerSettings(advantage=advantage))
        assert not make_roles(lambda: copy.deepcopy(fresh_model), settings, 0).prepares_ahead


def test_tokens_that_are_too_old_for_a_later_step_are_masked_there(fresh_model: Qwen3ForCausalLM) -> None:
    settings = RunSettings(k=1)
    groups = grouped(random_trajectories(1, groups=3, size=3))
    trained = train_batch(roles_of(fresh_model, settings), settings, groups, 3)
    assert [step.tally.fresh > 0 for step in trained] == [True, True, False]
    assert trained[2].tally.masked > 0 and trained[2].rows == 0


def test_each_epoch_takes_the_same_parts_again_a_batch_of_steps_older(fresh_model: Qwen3ForCausalLM) -> None:
    settings = RunSettings(k=9, trainer=TrainerSettings(minibatches_per_batch=2, epochs_per_batch=2))
    roles, groups = roles_of(fresh_model, settings), grouped(random_trajectories(1, groups=6, size=3))
    trained = train_batch(roles, settings, groups, 4)
    assert [(step.version, step.epoch) for step in trained] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert roles.learner.version == 4
    assert [step.groups for step in trained] == [groups[:3], groups[3:]] * 2
    assert [dict(step.tally.histogram).keys() for step in trained] == [{0}, {1}, {2}, {3}]
    assert trained[0].credited == trained[2].credited, "advantages are of the batch"


def test_tokens_that_are_over_k_by_the_second_epoch_are_masked_there(fresh_model: Qwen3ForCausalLM) -> None:
    settings = RunSettings(k=1, trainer=TrainerSettings(epochs_per_batch=3))
    trained = train_batch(
        roles_of(fresh_model, settings), settings, grouped(random_trajectories(1, groups=2, size=3)), 3
    )
    assert [step.tally.fresh > 0 for step in trained] == [True, True, False]
    assert trained[2].tally.masked == trained[0].tally.fresh and trained[2].rows == 0


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_epochs_are_the_steps_of_a_batch_that_holds_its_groups_so_often(
    fresh_model: Qwen3ForCausalLM, anchor: str
) -> None:
    """By hand: the parts laid one after the other, each with the advantages of the whole, and K out of the way."""
    groups = grouped(random_trajectories(2, groups=4, size=3))
    loss = LossSettings.model_validate({"anchor": anchor})
    trainer = TrainerSettings(epochs_per_batch=3, loss=loss, warmup_steps=0, learning_rate=5e-3)
    roles, by_hand = (roles_of(fresh_model, RunSettings(k=99, trainer=trainer)) for _ in range(2))
    train_batch(roles, RunSettings(k=99, trainer=trainer), groups, 6)
    credits, _ = by_hand.advantage_computer.of(groups)
    judged = [
        rows_of(part, number, 99, credits.part(part), skip_idle=by_hand.skips_idle)
        for number, part in enumerate(parts_of(groups, 2) * 3)
    ]
    parts = [pack(rows, tally, 4096, stem_width=by_hand.learner.stem_width) for rows, tally in judged]
    assert len(list(by_hand.learner.steps(parts))) == roles.learner.version == 6
    assert all(torch.equal(weight, by_hand.learner.weights()[name]) for name, weight in roles.learner.weights().items())


def test_the_proximal_policy_of_a_part_is_computed_once_for_all_epochs(
    fresh_model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the first, which has none in its first step."""
    trainer = TrainerSettings(epochs_per_batch=4, loss=LossSettings(anchor="proximal"))
    settings = RunSettings(k=99, trainer=trainer)
    roles, computed = roles_of(fresh_model, settings), []
    monkeypatch.setattr(roles.learner, "_proximal", lambda micro: computed.append(micro))
    packed = [
        pack(*rows_of(part, number, 99), 4096)
        for number, part in enumerate(parts_of(grouped(random_trajectories(2, groups=4, size=3)), 2) * 4)
    ]
    assert len(roles.learner.proximals(packed, 2)) == 8
    assert len(computed) == 2


def test_steps_that_make_no_whole_epochs_are_refused(fresh_model: Qwen3ForCausalLM) -> None:
    settings = RunSettings(k=9, trainer=TrainerSettings(epochs_per_batch=2))
    groups = grouped(random_trajectories(1, groups=3, size=3))
    with pytest.raises(ValueError, match="3 optimizer steps do not make 2 whole epochs"):
        train_batch(roles_of(fresh_model, settings), settings, groups, 3)


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_groups_that_make_no_equal_parts_are_refused(count: int) -> None:
    groups = grouped(random_trajectories(1, groups=count, size=2))
    with pytest.raises(ValueError, match="do not make 3 equal parts"):
        parts_of(groups, 3)


def test_every_step_is_held_against_the_policy_before_the_batch(fresh_model: Qwen3ForCausalLM) -> None:
    """Where that policy sampled the batch, `proximal` and `behaviour` are the same anchor, to the last step."""
    groups = sampled_by(fresh_model, random_trajectories(2, groups=6, size=4))
    ends = []
    for anchor in ("behaviour", "proximal"):
        loss = LossSettings.model_validate({"anchor": anchor})
        settings = RunSettings(k=2, trainer=TrainerSettings(learning_rate=5e-3, warmup_steps=0, loss=loss))
        roles = roles_of(fresh_model, settings)
        trained = train_batch(roles, settings, groups, 3)
        ends.append((roles.learner.weights(), trained[-1].statistics))
    assert (ends[0][1].clip_fraction or 0.0) > 0.0, "the policy must have moved away, or nothing is compared"
    assert ends[0][1].clip_fraction == ends[1][1].clip_fraction
    for name, weight in ends[0][0].items():
        torch.testing.assert_close(ends[1][0][name], weight, rtol=0, atol=1e-5)


def gradients(model: Qwen3ForCausalLM, settings: TrainerSettings, batch: PackedBatch) -> torch.Tensor:
    """Read off the first moment of AdamW's first step."""
    learner = Learner(copy.deepcopy(model), settings)
    learner.step(batch)
    moments = [learner.optimizer.state[weight]["exp_avg"].flatten() for weight in learner.model.parameters()]
    return torch.cat(moments) / (1 - settings.betas[0])


@pytest.mark.parametrize("mean", ["tokens", "segments", "fixed"])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_split_over_micro_batches_or_ranks_changes_the_gradient(
    fresh_model: Qwen3ForCausalLM, mean: str, seed: int
) -> None:
    correction = CorrectionSettings(mask="geometric", mask_low=0.5, mask_high=2.0)
    loss = LossSettings.model_validate({"mean": mean, "correction": correction})
    settings = TrainerSettings(clip_grad_norm=1e9, loss=loss)
    rows, tally = rows_of(grouped(random_trajectories(seed, groups=4, size=4)), 1, 2)
    whole = pack(rows, tally, 4096)
    assert len(whole.micro_batches) == 1
    wanted = gradients(fresh_model, settings, whole)
    largest = float(wanted.abs().max())
    assert largest > 1e-4
    for budget, ranks in ((1, 1), (17, 1), (40, 1), (25, 3), (4096, 4)):
        split = split_rows([len(row.token_ids) for row in rows], budget, ranks=ranks)
        parts = [micro_batch([rows[i] for i in together]) for rank in split for together in rank if together]
        found = gradients(fresh_model, settings, PackedBatch(parts, whole.size, whole.fresh))
        assert float((found - wanted).abs().max()) <= 1e-6 * max(0.1, largest), (budget, ranks)
