"""Memory that ranks of one machine share, for what they exchange on CPUs.

    rank 0 of a group   memfd, reserved ─► its address ─► broadcast
    the others          /proc/PID/fd/N ─► mapped ─► is rank 0's token in it? ─► all say yes, or none uses it

It has no name in a file system: it needs no room in /dev/shm, and is gone with the last rank that has it, also by kill -9.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

_TOKEN = 64
"""Bytes in front, by which ranks see that they have the same memory. Behind them tensors begin on a line of the cache."""
_log = structlog.get_logger()


def shared_bytes(group: dist.ProcessGroup, size: int) -> Tensor | None:
    """uint8 `[size]`, the same memory for all ranks of `group`, zeroed; None for all where they have none in common: on
    several machines, in several containers, and on systems other than Linux.

    All ranks call it, with the same size. It is unmapped with the last tensor that looks at it.
    """
    leads, token = group.rank() == 0, secrets.token_bytes(_TOKEN)
    descriptor, memory = -1, None
    try:
        if leads:
            with suppress(OSError):
                descriptor = _reserved(_TOKEN + size)
                memory = mmap.mmap(descriptor, _TOKEN + size)
                memory[:_TOKEN] = token
        told = torch.tensor([os.getpid(), descriptor, *token])
        dist.broadcast(told, group=group, group_src=0)
        process, number, *words = told.tolist()
        if not leads:
            with suppress(OSError, ValueError):
                memory = _mapped(f"/proc/{process}/fd/{number}", _TOKEN + size, bytes(words))
        there = torch.tensor(int(memory is not None))
        dist.all_reduce(there, dist.ReduceOp.MIN, group=group)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if memory is None or not there.item():
        _log.info("ranks exchange weights and gradients over the network", why="they have no memory in common")
        return None
    # The tensor holds on to the mapping.
    return torch.frombuffer(memory, dtype=torch.uint8)[_TOKEN:]


def _reserved(size: int) -> int:
    """A descriptor of so many bytes, all of them there: a write to some that are not would end the process (SIGBUS)."""
    if not hasattr(os, "memfd_create"):
        raise OSError("no memory without a name on this system")
    descriptor = os.memfd_create("rollmesh-ranks", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(path: str, size: int, token: bytes) -> mmap.mmap:
    """Another process's memory. Raises OSError or ValueError where `path` leads to none that begins with `token`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    if memory[:_TOKEN] != token:
        memory.close()
        raise ValueError(f"{path} is another memory")
    return memory
