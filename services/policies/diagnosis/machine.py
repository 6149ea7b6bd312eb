"""Findings of a machine: versions that do not fit, the GPU's driver, disk, ports, how fast weights can be read. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.policies.diagnosis.finding import Finding, error, warning
from services.wire.extras import install

EXPECTED_BYTES_PER_S = {"nixl": 0.3e9, "shm": 0.5e9}
"""What a transport reads on one host at the least, measured on two shared cores: nixl 2.2 to 2.9 GB/s (0.45 with UCX's
default list), shm memory's own. A third of the slowest that was seen."""
BUSY_LOAD = 1.5
"""Of a core: with so many processes that want to run, a trial that did not end says nothing about what was tried."""


@dataclass(frozen=True)
class Package:
    """An installed package that another one asks for. `fits`: whether its version is in the range `wanted`."""

    name: str
    version: str
    wanted: str
    asked_by: str
    fits: bool


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch. `cuda`: the CUDA version it was built for, None for a CPU build; `driver_cuda`: the newest one
    that the driver runs, None where it does not say."""

    version: str
    cuda: tuple[int, int] | None
    driver_cuda: tuple[int, int] | None


@dataclass(frozen=True)
class HostLoad:
    """How busy the machine is. `load`: its mean number of processes that run or wait to, of the last minute."""

    load: float
    cores: int

    @property
    def busy(self) -> bool:
        return self.load > BUSY_LOAD * self.cores


@dataclass(frozen=True)
class Transport:
    """How a weight transport did in a trial of one host. `why`: of its failure, None where it works."""

    name: str
    bytes_per_s: float = 0.0
    nbytes: int = 0
    why: str | None = None


def of_packages(packages: Sequence[Package]) -> Iterator[Finding]:
    for each in packages:
        if not each.fits:
            yield error(
                "versions",
                f"{each.name} {each.version} does not fit",
                f"{each.asked_by} asks for {each.name}{each.wanted}",
                f"pip install '{each.name}{each.wanted}'",
            )


def of_torch(torch: TorchBuild | None, gpus: int) -> Iterator[Finding]:
    """`gpus`: how many the driver lists."""
    if torch is None or not gpus:
        return
    seen = f"the driver lists {gpus} GPU{'s' if gpus > 1 else ''}, torch is {torch.version}"
    if torch.cuda is None:
        yield error(
            "gpu-driver",
            "torch is built for CPUs, and would leave the GPUs unused",
            seen,
            f"install torch's CUDA build: {install('vllm-gpu')}",
        )
    elif torch.driver_cuda is not None and torch.driver_cuda[0] < torch.cuda[0]:
        yield error(
            "gpu-driver",
            "the GPU's driver is too old for torch",
            f"{seen} for CUDA {_dotted(torch.cuda)}; the driver runs CUDA {_dotted(torch.driver_cuda)}",
            f"install a driver for CUDA {torch.cuda[0]}, or a torch for CUDA {torch.driver_cuda[0]}",
        )


def of_disk(where: str, free_bytes: int, wanted_bytes: int) -> Iterator[Finding]:
    """`wanted_bytes`: what a run wants to begin with."""
    if free_bytes < wanted_bytes:
        yield error(
            "disk",
            f"the disk of {where} is nearly full",
            f"{free_bytes >> 20} MiB are left, a run wants {wanted_bytes >> 20} MiB",
            "make room, or choose a --run-dir on another disk",
        )


def of_transport(trial: Transport) -> Iterator[Finding]:
    expected = EXPECTED_BYTES_PER_S.get(trial.name)
    if trial.why is not None:
        yield error(
            "nixl-unusable",
            f"the weight transport {trial.name} does not work on this host",
            trial.why,
            "leave UCX_TLS as it is, or set weights.transport=shm (one host) or nccl",
        )
    elif expected is not None and trial.bytes_per_s < expected:
        yield warning(
            "nixl-slow",
            f"the weight transport {trial.name} is slow on this host",
            f"{trial.bytes_per_s / 1e9:.2f} GB/s over {trial.nbytes >> 20} MiB, expected {expected / 1e9:.1f} or more",
            "leave UCX_TLS as it is (without cma and shared memory UCX copies through sockets); see what else runs here",
        )


def of_unended(what: str, said: str, busy: HostLoad) -> Finding:
    """Of a trial that ran out of its time on a machine that is `busy`. `what`: that was to be tried; `said`: that it did
    not end, and within how many seconds."""
    return warning(
        "not-tried",
        f"{what} could not be tried: the machine is too busy",
        f"{said}; load {busy.load:.1f} on {busy.cores} core{'s' if busy.cores != 1 else ''}",
        "try again when other work has ended; if it hangs then too, see what its code waits for",
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
