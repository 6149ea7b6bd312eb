"""Room for weight updates is kept before vLLM sizes its KV cache."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from services.wire.errors import UsageError
from weight_bus.vllm.room import leave_room_for_updates
from weight_bus.vllm.sets import shadow_mode, update_bytes
from weight_bus.vllm.weights import VllmWeights


def executor_of(available: list[int], kept: list[int], sized: int | None = None) -> object:
    """An executor of vLLM's interface, two ranks of which have so much left, with our wrapper on its class."""

    class Executor:
        vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=sized))

        def determine_available_memory(self) -> list[int]:
            return list(available)

        def collective_rpc(self, method: str | Callable[..., object]) -> object:
            return kept if method == "rollmesh_update_bytes" else None

    for _ in range(2):
        leave_room_for_updates(Executor)
    return Executor()


def asked(executor: object) -> list[int]:
    found: list[int] = executor.determine_available_memory()  # type: ignore[attr-defined]
    return found


def test_keys_and_values_get_what_updates_leave() -> None:
    assert asked(executor_of([100, 90], [30, 30])) == [70, 60]
    # Sized by hand: nothing is taken of it.
    assert asked(executor_of([50, 50], [30, 30], sized=50)) == [50, 50]
    with pytest.raises(ValueError, match=r"rank 1 has 1\.00 GiB beside its weights, and an update of them takes 2\.00"):
        asked(executor_of([3 << 30, 1 << 30], [2 << 30, 2 << 30]))


def test_what_is_kept_is_what_an_attachment_holds() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)).requires_grad_(False)
    parameters = dict(model.named_parameters())
    for mode, sets in (("device", 1), ("pinned", 2), ("sparse", 2)):
        held = held_tensors(VllmWeights(model, shadow_mode(mode)).sets)
        # On a CPU, where the host's memory is the device's.
        assert update_bytes(parameters, shadow_mode(mode)) == sum(tensor.nbytes for tensor in held)
        assert len(held) == sets * len(parameters)
        counted = VllmWeights(model, shadow_mode(mode)).sets.held
        total = sum(parameter.nbytes for parameter in parameters.values())
        assert (counted.beside, counted.host) == ((total, 0) if mode == "device" else (0, 2 * total))
    # As on a device: one set there, and the version before in the host's memory.
    in_place = VllmWeights(model, "device", in_place=True).sets.held
    assert in_place.beside == in_place.host == total
    with pytest.raises(UsageError, match="ROLLMESH_WEIGHTS_SHADOW=nowhere"):
        shadow_mode("nowhere")


def held_tensors(sets: object) -> list[torch.Tensor]:
    """All that it holds beside what is served."""
    tables = [table for name, table in vars(sets).items() if isinstance(table, dict) and name != "live"]
    return [tensor for table in tables for tensor in table.values()]
