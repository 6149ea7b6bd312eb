"""A folder with a random model of the type and shape of Qwen3-8B in bfloat16, for tests that have a GPU.

python -m tests.support.random_model FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.trainer.device import OF_8B, Shape


def save_random_model(shape: Shape, folder: Path, device: torch.device) -> None:
    """A large one is made on the GPU: drawing its weights on a CPU takes minutes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        shape.model(device).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    save_random_model(OF_8B, Path(sys.argv[1]), torch.device("cuda"))
