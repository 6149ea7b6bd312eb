"""Weights that are computed as they are published: the same bytes as if they had been there, and never two of them."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch")

from tests.unit.weight_bus.test_weight_contiguous import LARGE, filled, tensors  # noqa: E402
from weight_bus.manifest.computed import ComputedTensor, PublishedTensor, computed  # noqa: E402


class Making:
    """Makes copies of `weights`, and knows of those it made which still exist."""

    def __init__(self, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.weights, self.dtype = weights, dtype
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def of(self, name: str) -> ComputedTensor:
        def compute() -> torch.Tensor:
            self.most = max(self.most, 1 + sum(one() is not None for one in self.made))
            tensor = self.weights[name].to(self.dtype, copy=True)
            self.made.append(weakref.ref(tensor))
            return tensor

        return ComputedTensor(self.weights[name].shape, compute)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("which", [("b",), ("a", "d"), tuple(LARGE)], ids=["one", "two", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_in_place_as_others_are_and_exist_one_at_a_time(
    which: tuple[str, ...], threads: int, dtype: torch.dtype
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        making = Making(tensors(), dtype)
        mixed: dict[str, PublishedTensor] = {**tensors(), **{name: making.of(name) for name in which}}
        assert filled(mixed) == filled(tensors())
        assert (len(making.made), making.most) == (len(which), 1)
    finally:
        torch.set_num_threads(before)


def test_a_tensor_that_is_there_is_not_copied() -> None:
    there = torch.ones(3)
    assert computed(there) is there
    assert torch.equal(computed(ComputedTensor(there.shape, lambda: there + 1)), there + 1)
