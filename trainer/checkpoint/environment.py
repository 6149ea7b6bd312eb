"""What the bytes of a step depend on besides settings and data: libraries, device, and the run's first policy.

The same environment on a CPU computes the same bytes. Another one may not: then the run goes on under other versions
(`services.policies.versions`). Another model is another run. The number of threads, seed, loss and the like are settings
(`trainer.checkpoint.recovery.terms_of`), and may not change in a run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from blake3 import blake3

from services.config.settings import RunSettings
from services.policies.training.layout import ALONE, Layout

_LIBRARIES = ("rollmesh", "torch", "transformers")
_HASHED = ("*.safetensors", "*.bin", "*.gguf", "config.json")


@dataclass(frozen=True)
class Environment:
    """`model`: digest of the folder of the first policy. `parts`: everything else, by name."""

    model: str
    parts: dict[str, str]

    def changes(self, before: Environment | None) -> list[str]:
        """What is another than `before`, in words; nothing where that is not known."""
        if before is None:
            return []
        names = sorted(self.parts.keys() | before.parts.keys())
        pairs = [(name, before.parts.get(name, "–"), self.parts.get(name, "–")) for name in names]
        return [f"{name}: {old} → {new}" for name, old, new in pairs if old != new]


def present_environment(
    settings: RunSettings, model: Path, device: torch.device, layout: Layout = ALONE
) -> Environment:
    """Of this process. `model`: the folder of the first policy; `device`: where the trainer computes; `layout`: of its
    ranks, whose sums are made in another order than another's."""
    libraries = {name: version(name) for name in _LIBRARIES}
    parts = {
        "device": device_name(device),
        "deterministic": str(settings.trainer.deterministic).lower(),
        # Not of the step, but of the digests that are compared.
        "model.dtype": settings.model.dtype,
        "weights.bucket_mib": str(settings.weights.bucket_mib),
    }
    if layout != ALONE:
        # Left out elsewhere, so that one rank is what it was before there could be several.
        parts["ranks"] = str(layout)
    return Environment(model_digest(model), libraries | parts)


def repeat_exactly() -> None:
    """Have torch take kernels that give the same bytes each time, or raise where an operator has none.

    To be called before anything is computed: cuBLAS reads its variable once
    (docs.nvidia.com/cuda/cublas, "Results reproducibility").
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def device_name(device: torch.device) -> str:
    """`cpu` with the vector instructions that torch takes there, or the GPU's name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def model_digest(folder: Path) -> str:
    """blake3, hexadecimal, over names and contents of a Hugging Face folder's weights and `config.json`."""
    digest = blake3(max_threads=blake3.AUTO)
    for path in sorted({path for pattern in _HASHED for path in folder.glob(pattern)}):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update_mmap(path)
    return digest.hexdigest()
