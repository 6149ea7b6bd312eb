"""What a receiver needs of an engine: its weights, and memory for as much again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class WeightTarget(Protocol):
    """An engine's weights, by Hugging Face names: what is served, and memory for as much again.

    Both mappings have the same names, shapes and dtypes. Tensors may be views into fused ones.
    """

    def live(self) -> Mapping[str, torch.Tensor]: ...

    def shadow(self) -> Mapping[str, torch.Tensor]: ...

    def flip(self) -> None:
        """Serve the shadow. Called between two steps, on the thread that decodes."""
        ...

    def flip_back(self) -> None:
        """Serve what was served before the last flip. What it gives up is then the shadow, whole."""
        ...
