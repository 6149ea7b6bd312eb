"""What ranks exchange through memory is what they would exchange otherwise; without memory in common they do that."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.rank_pool import RankPool
from trainer.parallel.exchange import SharedGather, SharedReduce, Slots, share_memory
from trainer.parallel.shared_memory import shared_bytes

ROOM = 1536
"""Bytes: 40 numbers of a rank's part have room, of 300 the result alone would have, 1000 go in pieces, the last a short
one."""


def exchanged(rank: int, parts: list[int], dtype: torch.dtype) -> list[Any]:
    """For each number of a rank's part: what was gathered, the sum and the mean, as numpy arrays."""
    ranks, cpu, group = dist.get_world_size(), torch.device("cpu"), dist.group.WORLD
    assert group is not None
    memory = shared_bytes(group, ROOM * (2 + ranks))
    assert memory is not None and not memory.any()
    dist.barrier()
    slots = Slots(memory[2 * ROOM :].view(ranks, ROOM), rank)
    gather, reduce = SharedGather(memory[: 2 * ROOM].view(2, ROOM), slots), SharedReduce(slots)
    found = list[list[torch.Tensor]]()
    for part in parts:
        output = gather.allocate((ranks * part,), dtype=dtype, device=cpu)
        own = output[rank * part : (rank + 1) * part]
        own.copy_(numbers(rank, part, dtype))
        gather(output, own, group)
        # Read before the next is asked for; what was reduced stays.
        found.append([output.clone()])
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            every = reduce.allocate((ranks * part,), dtype=dtype, device=cpu)
            every.copy_(numbers(rank, ranks * part, dtype))
            result = reduce.allocate((part,), dtype=dtype, device=cpu)
            reduce(result, every, group, op)
            found[-1].append(result)
    return [[each.double().numpy() for each in told] for told in found]


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, which every dtype has, and whose sums no order changes."""
    return torch.from_numpy(np.random.default_rng([rank, count]).integers(-8, 8, count)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_and_what_is_gathered(rank_pool: RankPool, ranks: int, dtype: torch.dtype) -> None:
    parts = [40, 1000, 1, 300, 40, 40, 1000]
    for rank, found in enumerate(rank_pool.run(ranks, exchanged, parts, dtype)):
        for part, (gathered, total, mean) in zip(parts, found, strict=True):
            every = [numbers(each, ranks * part, torch.float64).numpy() for each in range(ranks)]
            wanted = np.sum(every, axis=0)[rank * part : (rank + 1) * part]
            np.testing.assert_array_equal(
                gathered, np.concatenate([numbers(each, part, torch.float64) for each in range(ranks)])
            )
            np.testing.assert_array_equal(total, wanted)
            np.testing.assert_allclose(mean, wanted / ranks, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


@contextmanager
def no_descriptors(here: bool) -> Iterator[None]:
    """Where it is `here`, this process can neither make memory nor open another's."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if here:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def gradients_of_sharded(rank: int, shares: bool, limited: int | None) -> dict[str, Any]:
    """Two layers of uneven sizes, two passes. `limited`: the rank that has no memory in common with the others."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5))
    modules = [fully_shard(module) for module in (*model, model)]
    if shares:
        with no_descriptors(rank == limited):
            share_memory(modules, group, shared_bytes)
    for number in range(2):
        inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(2 * number + rank))
        model(inputs).square().sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = parameter.grad.full_tensor().numpy()
    return found


@pytest.mark.parametrize("limited", [None, 0, 1])
def test_gradients_through_memory_and_without_any(rank_pool: RankPool, limited: int | None) -> None:
    through, without = (rank_pool.run(2, gradients_of_sharded, shares, limited) for shares in (True, False))
    for found, wanted in zip(through, without, strict=True):
        assert found.keys() == wanted.keys()
        for name in found:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-5)


def descriptors_of_memory() -> int:
    """Not of all: the threads of a group that an earlier test ended close theirs when they come to it."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += "memfd:" in str(each.readlink())
    return found


def mapped_by_all(rank: int, limited: int | None) -> tuple[bool, int]:
    """Whether this rank has the memory; and how many descriptors of memory are open by it."""
    group = dist.group.WORLD
    assert group is not None
    gc.collect()  # memory of earlier tests, which would go while this is counted
    before = descriptors_of_memory()
    with no_descriptors(rank == limited):
        memory = shared_bytes(group, 4096)
    return memory is not None, descriptors_of_memory() - before


@pytest.mark.parametrize("limited", [0, 1, 2])
def test_all_have_the_memory_or_none(rank_pool: RankPool, limited: int) -> None:
    # The mapping keeps one.
    assert rank_pool.run(3, mapped_by_all, None) == [(True, 1)] * 3
    assert rank_pool.run(3, mapped_by_all, limited) == [(False, 0)] * 3
