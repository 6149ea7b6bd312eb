"""Ranks for tests: processes that stay, in which a function runs as one of several ranks of a gloo process group.

with RankPool() as pool:                                        a start costs seconds, a call milliseconds
    losses = pool.run(2, loss_of_rank, "data", 7)               loss_of_rank(rank, "data", 7) in each of two processes
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

DEADLINE_S = 240.0
PRELOAD = ["torch", "torch.distributed.fsdp", "transformers", "trainer.run"]
"""There is one fork server in a process, with the modules that its first user names."""


class RankPool:
    """Processes are made when they are first needed, and ended with the pool, or when a call of them failed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._folder.cleanup()

    def run(
        self, world: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = DEADLINE_S
    ) -> list[Any]:
        """`function(rank, *arguments)` in `world` processes of one group, one thread each; what each returned, by rank.

        `function` is one of a module's own, and what it returns can be pickled (tensors as numpy arrays). Raises
        RuntimeError with the trace of each rank that failed, or did not answer.
        """
        while len(self._workers) < world:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        self._calls += 1
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        for rank, (_, pipe) in enumerate(self._workers[:world]):
            pipe.send((rank, world, store, function, arguments))
        results, failures = self._gather(world, deadline_s)
        if failures:
            self._end()
            raise RuntimeError("\n".join(f"rank {rank} of {world}: {why}" for rank, why in sorted(failures.items())))
        return [results[rank] for rank in range(world)]

    def _gather(self, world: int, deadline_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        """What ranks returned, and why others did not: after the first failure they are waited for a second more."""
        results, failures = dict[int, Any](), dict[int, str]()
        waiting, ends = {self._workers[rank][1]: rank for rank in range(world)}, time.monotonic() + deadline_s
        while waiting and (left := ends - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    good, answer = pipe.recv()
                except EOFError:
                    good, answer = False, "its process ended"
                if good:
                    results[rank] = answer
                else:
                    failures[rank], ends = answer, min(ends, time.monotonic() + 1.0)
        if waiting and not failures:
            failures = {rank: f"no answer within {deadline_s:g} s" for rank in waiting.values()}
        return results, failures

    def _end(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join(10)
        self._workers.clear()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    while True:
        try:
            rank, world, store, function, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            try:
                answer = True, function(rank, *arguments)
            finally:
                dist.destroy_process_group()
                # What torch has found out of layouts holds on to groups, by names that those of the next call have too.
                _clear_sharding_prop_cache()
        except Exception:  # noqa: BLE001 - whatever it was, the test is told
            answer = False, traceback.format_exc()
        pipe.send(answer)
