"""Layouts of a trainer's ranks."""

from __future__ import annotations

import re

import pytest

from services.config.checks import layout_asked, ranks_asked
from services.config.load import load_settings
from services.config.training.parallel import ParallelSettings
from services.policies.training.layout import ALONE, Layout, layout_of
from services.wire.errors import UsageError


def test_ranks_of_one_tensor_group_are_neighbours_and_train_on_the_same_rows() -> None:
    layout = layout_of(24, replicate=2, data=3, context=2, tensor=2)
    places = [*layout]
    assert len(set(places)) == 24 and [layout.rank(place) for place in places] == [*range(24)]
    assert [place.tensor for place in places[:4]] == [0, 1, 0, 1]
    assert [place.context for place in places[:4]] == [0, 0, 1, 1]
    assert layout.shares == 6
    assert [layout.share(rank) for rank in range(24)] == [share for share in range(6) for _ in range(4)]


def test_data_ranks_are_what_the_others_leave() -> None:
    assert layout_of(8, tensor=2) == Layout(data=4, tensor=2)
    assert layout_of(1) == ALONE and str(ALONE) == "1 rank"
    assert str(Layout(data=4, tensor=2)) == "4 data × 2 tensor"


@pytest.mark.parametrize(
    ("ranks", "asked", "says"),
    [
        (8, {"tensor": 3}, r"8 ranks cannot be split.* = 3"),
        (8, {"data": 2, "tensor": 2}, r"replicate 1 × data 2 × context 1 × tensor 2 = 4 ranks, and there are 8"),
        (8, {"data": 8, "expert": 3}, "expert=3 does not divide the 8 data ranks"),
        (8, {"tensor": 4, "expert": 2}, "expert=2: the 4 tensor ranks split experts among all of them"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sum(ranks: int, asked: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        layout_of(ranks, **asked)  # type: ignore[arg-type]


def test_experts_are_split_by_tensor_ranks_where_there_are_any() -> None:
    assert Layout(data=4, tensor=2, expert=2).expert_on == "tensor"
    assert Layout(data=4, expert=2).expert_on == "data"
    assert Layout(data=4).expert_on is None


def test_the_settings_are_the_layouts_words() -> None:
    assert layout_asked(ParallelSettings(tensor=2), 4) == layout_of(4, tensor=2) == Layout(data=2, tensor=2)


def test_ranks_that_were_started_must_be_those_that_are_asked_for() -> None:
    assert layout_asked(ParallelSettings(), 8) == Layout(data=8)
    assert ranks_asked(ParallelSettings(expert=2, replicate=2)) == 4 and layout_asked(
        ParallelSettings(expert=2), 8
    ) == Layout(data=8, expert=2)
    assert ranks_asked(ParallelSettings()) == 1 and ranks_asked(ParallelSettings(data=3, replicate=2)) == 6
    with pytest.raises(UsageError, match=r"trainer\.parallel: .*data 4 .* = 4 ranks, and there are 2"):
        layout_asked(ParallelSettings(data=4), 2)


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.optimizer.kind=muon",
        "trainer.optimizer.state_bits=8",
        "trainer.optimizer.offload=true",
        "trainer.offload_idle=true",
        "trainer.compile=true",
        "weights.transport=nccl",
    ],
)
def test_what_several_ranks_do_not_know_is_refused_by_name(setting: str) -> None:
    assert load_settings(None, ["trainer.parallel.data=2"]).trainer.parallel.data == 2
    with pytest.raises(UsageError, match=re.escape(setting)):
        load_settings(None, ["trainer.parallel.data=2", setting])


def test_ranks_of_one_machine_share_its_threads() -> None:
    alone, two = (load_settings(None, overrides) for overrides in ([], ["trainer.parallel.data=2"]))
    assert alone.with_threads(9, tiny=False).trainer.thread_count == 9
    assert two.with_threads(9, tiny=False).trainer.thread_count == 4
    assert two.with_threads(1, tiny=False).trainer.thread_count == 1
