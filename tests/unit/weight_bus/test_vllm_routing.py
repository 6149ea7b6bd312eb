"""Which experts vLLM chose: rows by the slots of its KV cache, told once for each token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rollout_server.engines.vllm.convert import chosen_experts, take_rows
from services.wire.errors import UsageError
from weight_bus.vllm.routing import SlotRows, tell_experts

LAYERS, TOP, EXPERTS = 2, 2, 8


def step(rows: SlotRows, slots: list[int], number: int) -> None:
    """Tokens in these slots are computed; layer `l` chooses the experts `number + l` and `number + l + 1` for all."""
    for layer in range(LAYERS):
        rows.chose(layer, np.full((len(slots), TOP), number + layer) + np.arange(TOP))
    rows.computed(np.array(slots))


def test_a_token_is_told_once_and_a_cached_prefix_by_whoever_reads_it() -> None:
    rows = SlotRows(64, LAYERS, TOP, EXPERTS)
    step(rows, [8, 9, 10], 0)
    first, told = rows.tell("a", np.array([8, 9, 10]))
    assert (first, told.shape, told.dtype) == (0, (3, LAYERS, TOP), np.uint8)
    assert told.tolist() == [[[0, 1], [1, 2]]] * 3
    # A token of `a`, and of `b` the part of its prompt that is not in the cache.
    step(rows, [11, 32, 33], 4)
    first, told = rows.tell("a", np.array([8, 9, 10, 11]))
    assert (first, told[:, 0, 0].tolist()) == (3, [4])
    first, told = rows.tell("b", np.array([8, 9, 32, 33]))
    assert (first, told[:, 0, 0].tolist()) == (0, [0, 0, 4, 4])
    # The memory of `a` was taken and all is computed again, elsewhere: what was told stays.
    step(rows, [40, 41, 42, 43, 44], 6)
    first, told = rows.tell("a", np.array([40, 41, 42, 43, 44]))
    assert (first, told[:, 0, 0].tolist()) == (4, [6])
    rows.forget("a")
    assert rows.tell("a", np.array([40]))[0] == 0
    unknown = rows.tell("c", np.array([50]))[1]
    assert chosen_experts(unknown, 1).packed == b"\xff" * LAYERS * TOP


def test_rows_of_tokens_that_are_not_handed_over_yet_are_left_to_vllm() -> None:
    chunks = [np.full((count, LAYERS, TOP), count, np.uint8) for count in (3, 1, 2)]
    taken = take_rows(chunks, 4)
    assert taken is not None and taken[:, 0, 0].tolist() == [3, 3, 3, 1]
    assert [chunk.shape[0] for chunk in chunks] == [2]
    assert take_rows(chunks, 5) is not None and chunks == []
    assert take_rows(chunks, 1) is None
    choices = chosen_experts(taken, 9)
    assert (choices.begin, choices.end, choices.layers, choices.top, choices.itemsize) == (5, 9, LAYERS, TOP, 1)


@pytest.mark.parametrize(
    "runner",
    [
        SimpleNamespace(device="cuda", speculative_config=None),
        SimpleNamespace(device="cpu", speculative_config=object()),
    ],
    ids=["gpu", "speculative"],
)
def test_what_is_not_told_of_is_refused(runner: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match=r"rollout\.routing_replay: vLLM tells which experts it chose here on a CPU"):
        tell_experts(runner)
