"""The copy that a checkpoint is written from: exact, apart from what it is of, and in memory that is used again."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from trainer.checkpoint.host_copy import copied


def state(seed: int) -> dict[str, Tensor]:
    """Tensors of several types and shapes, as optimizers have them."""
    torch.manual_seed(seed)
    return {
        "weight": torch.randn(5, 7).T,
        "low": torch.randn(3, 3).to(torch.bfloat16),
        "codes": torch.randint(0, 255, (11,), dtype=torch.uint8),
        "step": torch.tensor(float(seed)),
        "none": torch.empty(0, 4),
    }


def assert_same(copies: dict[str, Tensor], live: dict[str, Tensor]) -> None:
    assert list(copies) == list(live)
    for name, tensor in live.items():
        assert copies[name].dtype == tensor.dtype and torch.equal(copies[name], tensor), name
        assert copies[name].is_contiguous()


def test_later_copies_are_written_over_the_same_memory() -> None:
    first, second = state(1), state(2)
    copies = copied(first, {})
    places = {name: copy.data_ptr() for name, copy in copies.items()}
    first["weight"].zero_()
    assert_same(copies, state(1))
    again = copied(dict(reversed(second.items())), copies)
    assert_same(again, dict(reversed(second.items())))
    assert {name: copy.data_ptr() for name, copy in again.items()} == places
    assert len({copy.untyped_storage().data_ptr() for copy in again.values()}) == 1


def test_copies_of_other_tensors_are_let_go_of_before_new_memory_is_taken() -> None:
    copies = copied(state(1), {})
    held = [weakref.ref(copy) for copy in copies.values()]
    more = state(2) | {"moment": torch.ones(4)}
    assert_same(copied(more, copies), more)
    assert not copies and not any(reference() is not None for reference in held)
