"""The trainer's benchmark: its arms do the same work, its batch is what it says, its report says what is missing."""

from __future__ import annotations

import copy
import math
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.trainer.device import FIGURES as FIGURES_OF_A_GPU
from benchmarks.trainer.device import OF_1_7B, OF_8B, Shape, measure_device
from benchmarks.trainer.peaks import Sizes, measure_peaks
from benchmarks.trainer.plan_cases import Case, named, sized
from benchmarks.trainer.planned import measure_plans
from benchmarks.trainer.prefixes import measure_prefixes
from benchmarks.trainer.rank_errors import measure_rank_errors
from benchmarks.trainer.ranks import measure_ranks
from benchmarks.trainer.report import FIGURES, Measured, as_table, put_together
from benchmarks.trainer.step_speed import PROMPT_TOKENS, HeavyTail, PaddedLoop, SpeedPlan, as_groups, measure_speed
from services.config.settings import TrainerSettings
from services.policies.training.layout import Layout
from services.wire.errors import UsageError
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model.learner import Learner
from trainer.sft.tiny_model import build_model

SMALL = HeavyTail(groups=2, group_size=4, median=6.0, sigma=0.8, longest=24)


def test_lengths_are_log_normal_up_to_the_longest() -> None:
    tail = HeavyTail(groups=100, group_size=20)
    lengths = [len(answer.completion) for answer in tail.answers(1)]
    assert statistics.median(lengths) == pytest.approx(tail.median, rel=0.1)
    assert statistics.stdev(map(math.log, lengths)) == pytest.approx(tail.sigma, rel=0.1)
    assert max(lengths) == tail.longest
    assert tail.answers(1) == tail.answers(1) != tail.answers(2)


@pytest.mark.parametrize("cut", [False, True])
def test_the_padded_loop_makes_the_step_that_the_learner_makes(cut: bool) -> None:
    """Or the comparison would be of two different things."""
    model = build_model(seed=2, hidden_size=32, layers=1)
    settings, answers = TrainerSettings(warmup_steps=0), SMALL.answers(3)
    loop = PaddedLoop(copy.deepcopy(model), settings, rows=3, cut=cut)
    learner = Learner(copy.deepcopy(model), settings)
    rows, tally = rows_of(as_groups(answers, SMALL.group_size), 0, 0)
    learner.step(pack(rows, tally, 100))
    loop.step(answers)
    assert tally.fresh == sum(len(answer.completion) for answer in answers)
    # The gradient, clipped: AdamW's first step is a sign, also where a gradient is all rounding.
    moments = [
        [optimizer.state[weight]["exp_avg"] for weight in model.parameters()]
        for optimizer, model in ((loop.optimizer, loop.model), (learner.optimizer, learner.model))
    ]
    largest = max(moment.abs().max().item() for moment in moments[1])
    assert largest > 1e-3
    for padded, packed in zip(*moments, strict=True):
        torch.testing.assert_close(padded, packed, rtol=0, atol=1e-5 * largest)


async def test_without_trl_the_rest_is_measured_and_the_reason_told(tmp_path: Path) -> None:
    said: list[str] = []
    threads = torch.get_num_threads()
    measured = await measure_speed(SpeedPlan(2, 1, 1, tail=SMALL, rows=3), None, tmp_path, said.append)
    torch.set_num_threads(threads)
    assert len(measured.rounds["packed_vs_padded"]) == len(said) == 2
    assert "no Python with TRL" in measured.missing["vs_trl"]
    assert f"8 answers after {PROMPT_TOKENS} tokens of prompt" in measured.seen["batch"]


@pytest.mark.slow
async def test_what_is_shared_and_what_is_kept_is_measured() -> None:
    threads, said = torch.get_num_threads(), list[str]()
    prefixes = await measure_prefixes(1, 1, 1, said.append, {"shared_prefix_time": (24, 2)})
    torch.set_num_threads(threads)
    peaks = await measure_peaks(1, 1, said.append, Sizes(tokens=64, vocabulary=1024, hidden=16, row=512, width=64))
    assert len(prefixes.rounds["shared_prefix_time"]) == 1 and len(said) == 3
    assert {name: len(rounds) for name, rounds in peaks.rounds.items()} == {
        "head_peak": 1,
        "head_time": 1,
        "ckpt_peak": 1,
    }
    assert peaks.rounds["ckpt_peak"][0] < 0.5


def test_operations_of_a_step_are_counted_as_by_hand() -> None:
    shape = Shape(hidden=4, layers=2, heads=2, kv_heads=1, feed_forward=8, vocabulary=10, head_dim=2)
    # A layer: q and o 4 × 4 each, k and v 4 × 2 each, three of 4 × 8; the head 4 × 10.
    assert shape.weights == 2 * (16 + 16 + 8 + 8 + 3 * 32) + 40 == 328
    # Of 6 tokens in rows of 3: products 2 · 328, attention 2 · 2 layers · 2 heads · 2 · 3 a token, forward.
    assert shape.flops(6, 3, frozen=False) == 6 * 3 * (656 + 48)
    assert shape.flops(6, 3, frozen=True) == 6 * (2 * 656 + 3 * 48)
    assert round(OF_1_7B.weights / 1e9, 2) == 1.72 and round(OF_8B.weights / 1e9, 2) == 7.57


def test_without_a_gpu_its_figures_are_missing_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    measured = measure_device(1, lambda _: None)
    assert measured.missing == dict.fromkeys(FIGURES_OF_A_GPU, "not measured: no GPU") and not measured.rounds
    assert set(FIGURES_OF_A_GPU) < set(FIGURES)


def test_a_report_holds_its_figures_and_why_some_are_missing() -> None:
    parts = [
        Measured(rounds={"packed_vs_padded": [2.0, 4.0, 3.0]}, missing={"vs_trl": "no TRL"}),
        Measured(rounds={"idle_fraction": [0.01]}, seen={"paced": "by the clock"}),
    ]
    bench = put_together(parts, (0.0, 0.0, 0.0), {"torch": "2"})
    known = {name: getattr(bench, name) for name in FIGURES if getattr(bench, name) is not None}
    assert known == {"packed_vs_padded": 3.0, "idle_fraction": 0.01}
    assert bench.missing == {"vs_trl": "no TRL"} | {
        name: "not asked for" for name in FIGURES if name not in (*known, "vs_trl")
    }
    assert as_table(bench).row_count == len(FIGURES) + 1


@pytest.mark.slow
async def test_a_plan_of_memory_is_what_a_process_takes() -> None:
    case = Case("small", sized(256, 4, (8, 4, 32), 768, 4096), ["trainer.micro_batch_tokens=1024"])
    said: list[str] = []
    measured = await measure_plans(said.append, cases=[case], large=())
    assert measured.rounds["peak_vs_estimate"] == [pytest.approx(1.0, abs=0.1)]
    assert measured.rounds["formula_vs_fake"] == [pytest.approx(1.0, abs=0.1)]
    assert set(measured.rounds) <= set(FIGURES) and "MiB predicted" in said[0]


@pytest.mark.slow
async def test_two_ranks_are_measured_against_one() -> None:
    said: list[str] = []
    measured = await measure_ranks(1, said.append, hidden_size=64, layers=1, steps=1)
    assert set(measured.rounds) == {"scaling_2", "overhead_1", "pack_share", "publish_peak_share"} <= set(FIGURES)
    assert 0.0 < measured.rounds["publish_peak_share"][0] <= 1.0
    assert 0.0 < measured.rounds["pack_share"][0] < 0.5 < 2.5 * measured.rounds["scaling_2"][0]
    assert "s on two" in said[0]


@pytest.mark.slow
async def test_ranks_that_split_experts_are_held_against_one_process() -> None:
    said: list[str] = []
    layouts = {2: [Layout(data=2, expert=2)]}
    measured = await measure_rank_errors(said.append, layouts, ("plain", "full", "bfloat16"), steps=2)
    assert set(measured.rounds) == {"parallel_max_error", "parallel_half_error"} <= set(FIGURES)
    # Sums are made in another order: not 0.
    assert 0.0 < measured.rounds["parallel_max_error"][0] <= 1e-5
    assert 0.5 < measured.rounds["parallel_half_error"][0] <= 2.0
    assert [line.partition(":")[0] for line in said if "expert," in line] == [
        f"2 data × 2 expert, experts, {option}" for option in ("plain", "full", "bfloat16")
    ]
    assert "trainer.optimizer.offload=true" in measured.seen["refused with several ranks"]


def test_plans_are_chosen_by_name() -> None:
    cases, large = named("bfloat16, 2 ranks")
    assert len(cases) == 6 and not large and all("trainer.dtype=bfloat16" in case.overrides for case in cases)
    assert [case.name for case, _ in named("70B")[1]] == ["Llama-3-70B on 32"]
    with pytest.raises(UsageError, match="no plan has 'float8' in its name"):
        named("float8")
