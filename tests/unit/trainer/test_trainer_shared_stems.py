"""What rows have in common at their beginning is computed once, and nothing that is learnt from changes."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import Node
from transformers import Qwen3ForCausalLM

from services.config.settings import TrainerSettings
from services.config.training.algorithm import LossSettings
from services.policies.token_budget import pays, saved_by_sharing
from services.wire.trajectory import Trajectory
from tests.support.examples import examples
from tests.support.trajectories import a_rollout, a_segment, grouped
from tests.unit.trainer.test_trainer_packed_forward import MODELS, a_model
from trainer.data.packing import Condensed, MicroBatch, PackedRow, micro_batch, pack, split_batch
from trainer.data.rows import rows_of
from trainer.model.forward import PackedForward
from trainer.model.learner import Learner
from trainer.model.logprobs import sampled_terms
from trainer.sft.tiny_model import build_model

WIDE = 1 << 20
"""So wide that whatever can be shared is."""


@st.composite
def siblings(draw: st.DrawFn) -> list[Trajectory]:
    """Groups with a prompt each, answers of few distinct tokens, some with an environment's tokens in between."""
    made: list[Trajectory] = []
    for ordinal in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
        size = draw(st.integers(2, 6))
        for member in range(size):
            answer = draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))
            segments = [a_segment(prompt, answer, [-0.1 * (i + 1) for i in range(len(answer))], [0] * len(answer))]
            if draw(st.booleans()):
                turn = [*prompt, *answer, *draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))]
                segments.append(a_segment(turn, [1, 2], [-0.3, -0.4], [0, 0]))
            made.append(a_rollout(segments, float(member % 2), group=f"g{ordinal}", size=size, member=member))
    return made


def condensed(micro: MicroBatch, width: int) -> Condensed:
    assert micro.row.needs is not None
    return micro.row.needs.condensed(width, torch.device("cpu"))


def contexts(row: PackedRow) -> list[list[tuple[int, int]]]:
    """For each packed token what it sees, itself included: ids and positions."""
    ids, positions, starts = row.input_ids[0].tolist(), row.position_ids[0].tolist(), row.starts.tolist()
    found: list[list[tuple[int, int]]] = []
    for number, (begin, end) in enumerate(pairwise(starts)):
        if row.shared is None:
            seen = [*range(begin, end)]
        else:
            own = row.shared.starts.tolist()
            seen = row.shared.seen.tolist()[own[number] : own[number + 1]]
        assert seen[len(seen) - (end - begin) :] == [*range(begin, end)], "its own come last"
        for place in range(begin, end):
            found.append([(ids[each], positions[each]) for each in seen[: len(seen) - (end - 1 - place)]])
    return found


@examples(200)
@given(siblings(), st.sampled_from([1, 64, WIDE]))
def test_each_token_is_sampled_after_what_stood_before_it(played: list[Trajectory], width: int) -> None:
    rows, _ = rows_of(grouped(played), 0, 0)
    micro = micro_batch(rows)
    found = condensed(micro, width)
    seen, wanted, before = contexts(found.row), contexts(micro.row), (micro.places - 1).tolist()
    assert [seen[place] for place in found.places[before].tolist()] == [wanted[place] for place in before]
    assert all([position for _, position in each] == [*range(len(each))] for each in seen)
    assert sum(length * count for length, count in found.row.runs) == len(seen)
    # Nothing is computed that nobody needs, and what is not computed cannot be asked for.
    needed = {tuple(wanted[place][:length]) for place in before for length in range(1, len(wanted[place]) + 1)}
    assert {tuple(each) for each in seen} == needed
    for place, at in enumerate(found.places.tolist()):
        assert seen[at] == wanted[place] if at < len(seen) else at == len(seen)
    assert len(seen) < len(wanted)
    if width == WIDE:
        assert len(seen) <= len(needed), "each of them once"


def test_siblings_are_laid_as_a_tree_of_what_they_have_in_common() -> None:
    answers = [[5, 6, 7], [5, 6, 8], [9], [5, 6, 7], [5, 4, 4]]
    played = [
        a_rollout(
            [a_segment([1, 2, 3], answer, [-0.5] * len(answer), [0] * len(answer))], float(i * i), size=5, member=i
        )
        for i, answer in enumerate(answers)
    ]
    rows, _ = rows_of(grouped(played), 0, 0)
    micro = micro_batch(rows)
    found = condensed(micro, WIDE)
    # Three rows need 1 2 3 5 6, one 1 2 3 5 4, one 1 2 3; after the last token nothing was sampled: it is not computed.
    assert found.row.input_ids.tolist() == [[1, 2, 3, 5, 6, 4]]
    assert found.row.position_ids.tolist() == [[0, 1, 2, 3, 4, 4]]
    assert found.row.runs == ((3, 1), (1, 1), (1, 2))
    assert found.row.shared is not None and found.row.shared.before == (0, 3, 4)
    assert found.row.shared.seen.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 5]
    assert found.row.shared.starts.tolist() == [0, 3, 7, 12, 17] and found.row.shared.longest == 5
    assert found.places[micro.places - 1].tolist() == [2, 3, 4, 2, 3, 4, 2, 2, 3, 4, 2, 3, 5]
    assert found.places[micro.places].tolist() == [3, 4, 6, 3, 4, 6, 6, 3, 4, 6, 3, 5, 6]


def test_rows_without_anything_in_common_stand_whole() -> None:
    played = [
        a_rollout([a_segment([i + 1], [5, 6], [-0.5] * 2, [0] * 2)], float(i), size=2, member=i) for i in range(2)
    ]
    rows, _ = rows_of(grouped(played), 0, 0)
    row = condensed(micro_batch(rows), WIDE).row
    assert row.shared is None and row.input_ids.tolist() == [[1, 5, 2, 5]]


@examples(100)
@given(siblings(), st.integers(1, 60))
def test_every_row_is_in_one_pass_which_keeps_to_the_budget(played: list[Trajectory], budget: int) -> None:
    rows, _ = rows_of(grouped(played), 0, 0, skip_idle=False)
    split = split_batch(rows, budget, WIDE)
    assert sorted(row for together in split for row in together) == [*range(len(rows))]
    for together in split:
        found = condensed(micro_batch(rows.take(np.array(together))), WIDE)
        assert len(together) == 1 or found.row.input_ids.shape[1] <= budget


def test_siblings_are_computed_in_one_pass_however_long_they_are() -> None:
    """Prompts of 256 tokens and answers of 2 to 60: by length, siblings would stand in three passes."""
    chance = random.Random(0)
    played = []
    for group in range(4):
        prompt = [chance.randrange(60) for _ in range(256)]
        for member in range(8):
            answer = [chance.randrange(60) for _ in range(chance.randint(2, 60))]
            segment = a_segment(prompt, answer, [-4.0] * len(answer), [0] * len(answer))
            played.append(
                a_rollout([segment], float(member % 2), group=f"g{group}", ordinal=group, size=8, member=member)
            )
    rows, tally = rows_of(grouped(played), 0, 0)
    assert len(pack(rows, tally, 800).micro_batches) > 8
    passes = pack(rows, tally, 800, stem_width=64).micro_batches
    assert len(passes) == 4
    computed = sum(condensed(micro, 64).row.input_ids.shape[1] for micro in passes)
    assert computed < 4 * 256 + int(rows.lengths.sum()) - 32 * 256


@given(st.integers(1, 400), st.integers(2, 16), st.sampled_from([64, 1024, 4096]))
def test_a_stem_is_shared_where_that_is_less_work(stem: int, rows: int, width: int) -> None:
    if stem >= 8:
        assert saved_by_sharing(stem, [1] * rows, width) > 0
    # All pairs of so long a rest cost more than any stem saves.
    assert saved_by_sharing(stem, [100 * width] * rows, width) < 0
    assert saved_by_sharing(stem, [8], width) < 0


def test_a_few_tokens_saved_are_not_worth_a_call() -> None:
    """Two short rows in a small model; the same in a wide one, and a hundred of them, are."""
    saved = {width: saved_by_sharing(9, [5, 5], width) for width in (32, 4096)}
    assert (pays(saved[32], 1, 32), pays(saved[4096], 1, 4096), pays(100 * saved[32], 1, 32)) == (False, True, True)


def operations(last: Node) -> set[str]:
    """The names of all that a gradient passes."""
    waiting, seen = [last], set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return {node.name() for node in seen}


@pytest.mark.parametrize("name", [name for name, (_, separation) in MODELS.items() if separation == "within"])
def test_a_model_gives_the_same_logprobs_and_gradients(name: str) -> None:
    """Windows, grouped keys, learned positions: whatever its attention does, a stem is seen as if it stood in the row."""
    prompts = ([3, 1, 4, 1, 5, 9, 2, 6], [7, 7])
    answers = [[[5, 6, 7, 8], [5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6]], [[3], [4, 4], [4, 4, 5], [8]]]
    played = [
        a_rollout(
            [a_segment(prompt, answer, [-0.5] * len(answer), [0] * len(answer))], float(i), group=f"g{g}", member=i
        )
        for g, prompt in enumerate(prompts)
        for i, answer in enumerate(answers[g])
    ]
    rows, _ = rows_of(grouped(played), 0, 0)
    micro = micro_batch(rows)
    assert condensed(micro, WIDE).row.shared is not None
    found = []
    for shares in (False, True):
        model = a_model(name)
        policy = PackedForward(model)
        assert policy.stem_width == model.config.hidden_size
        policy.stem_width = WIDE
        seen = micro if shares else replace(micro, row=replace(micro.row, needs=None))
        logprobs, _ = sampled_terms(policy, seen)
        assert logprobs.grad_fn is not None
        assert not {"IndexBackward0", "IndexPutBackward0"} & operations(logprobs.grad_fn), (
            "several threads would add up the gradient of equal places in any order: other bytes in each process"
        )
        (logprobs * micro.advantages.cumsum(0)).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found.append([logprobs.detach(), *gradients])
    largest = max(float(each.abs().max()) for each in found[0][1:])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    for whole, shared in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(shared, whole, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("name", [name for name, (_, separation) in MODELS.items() if separation != "within"])
def test_other_models_get_whole_rows(name: str) -> None:
    assert PackedForward(a_model(name)).stem_width is None


def test_a_step_on_shared_stems_is_that_on_whole_rows() -> None:
    """Loss, statistics and weights; and the same bytes each time."""
    fresh: Qwen3ForCausalLM = build_model(seed=5)
    played = [
        a_rollout(
            [a_segment([*range(2, 11), 11 + group], answer, [-4.0] * len(answer), [0] * len(answer))],
            float(member == group % 4),
            group=f"g{group}",
            member=member,
        )
        for group in range(16)
        for member, answer in enumerate([[6, 7, 8], [6, 7, 8], [9, 9], [6, 7, 9, 9]])
    ]
    settings = TrainerSettings(warmup_steps=0, loss=LossSettings(entropy=0.01))
    ends = []
    for shares in (False, True, True):
        learner = Learner(copy.deepcopy(fresh), settings)
        rows, tally = rows_of(grouped(played), 0, 0)
        batch = pack(rows, tally, settings.micro_batch_tokens)
        assert condensed(batch.micro_batches[0], 64).row.shared is not None
        if not shares:
            whole_rows = [replace(micro, row=replace(micro.row, needs=None)) for micro in batch.micro_batches]
            batch = replace(batch, micro_batches=whole_rows)
        ends.append((learner.step(batch), learner.weights()))
    (whole, weights), (shared, found), (again, same) = ends
    assert shared == again and all(torch.equal(found[name], same[name]) for name in found)
    for name in ("loss", "grad_norm", "logprob_gap_mean", "ratio_mean", "kl"):
        assert getattr(shared, name) == pytest.approx(getattr(whole, name), rel=1e-4, abs=1e-6), name
    assert all(not torch.equal(weights[name], before) for name, before in fresh.named_parameters())


@pytest.mark.parametrize("seed", range(4))
def test_gradients_on_random_trees_of_branches_are_those_of_whole_rows(seed: int) -> None:
    """In float64 but for norms, which the model makes in float32."""
    chance = random.Random(seed)
    ways: list[list[int]] = [[chance.randrange(60) for _ in range(chance.randint(3, 30))] for _ in range(2)]
    for _ in range(12):
        way = chance.choice(ways)
        kept = way[: chance.randint(2, len(way))]
        ways.append([*kept, *(chance.randrange(60) for _ in range(chance.randint(1, 12)))])
    played = []
    for member, way in enumerate(ways):
        asked = chance.randint(1, len(way) - 1)
        answer = way[asked:]
        segment = a_segment(way[:asked], answer, [-4.0] * len(answer), [0] * len(answer))
        played.append(a_rollout([segment], chance.random(), size=len(ways), member=member))
    rows, tally = rows_of(grouped(played), 0, 0)
    batch = pack(rows, tally, 4096)
    fresh = build_model(seed=5, hidden_size=32, layers=2).double()
    found = []
    for shares in (False, True):
        learner = Learner(copy.deepcopy(fresh), TrainerSettings(clip_grad_norm=1e9))
        learner._policy.stem_width = WIDE if shares else None
        learner.gradient(batch, learner.proximals([batch])[0])
        found.append([weight.grad for weight in learner.model.parameters()])
    laid = condensed(batch.micro_batches[0], WIDE).row
    assert laid.shared is not None and len({*laid.shared.before}) > 2, "deeper than stem and branch"
    for whole, shared in zip(*found, strict=True):
        assert whole is not None and shared is not None
        assert float((whole - shared).abs().max()) <= 1e-6 * float(whole.abs().max())
