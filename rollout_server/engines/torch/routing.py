"""Which experts a mixture's layers choose for each token, as their routers say it in a forward pass.

    with routing.into(experts, ids):  model(…)        hooks on the routers write their choices into the window

A router is what `transformers` records as `router_logits`; its output is (logits, weights, indices), the last int64
`[tokens, top]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from services.wire.errors import UsageError


class Routing:
    """Of `model`: `layers` of it choose `top` of `experts` each. Raises UsageError where that cannot be seen."""

    def __init__(self, model: PreTrainedModel) -> None:
        recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
        routers = []
        if isinstance(recorder, OutputRecorder):
            routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]
        self.layers, self.top, self.experts = len(routers), 0, 0
        self._experts: torch.Tensor | None = None
        self._rows = self._queries = 0
        self._seen: list[tuple[int, int]] = []
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._hook(layer))
        if routers:
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
        if len(self._seen) != len(routers) or len(set(self._seen)) != 1:
            raise UsageError(
                f"rollout.routing_replay: a {model.config.model_type} model has no layers whose choice of experts is seen",
                "leave it out",
            )
        self.experts, self.top = self._seen[0]

    @contextmanager
    def into(self, experts: torch.Tensor, ids: torch.Tensor) -> Iterator[None]:
        """Write the choices for `ids` `[rows, q]` into the last q columns of `experts` (`kv_cache.KvWindow`)."""
        self._experts, (self._rows, self._queries) = experts, ids.shape
        try:
            yield
        finally:
            self._experts = None

    def _hook(self, layer: int) -> Any:
        def keep(_: nn.Module, __: tuple[object, ...], output: object) -> None:
            if not isinstance(output, tuple) or len(output) != 3:
                return
            logits, chosen = output[0], output[2]
            if not isinstance(chosen, torch.Tensor) or not isinstance(logits, torch.Tensor):
                return
            if chosen.is_floating_point():
                return
            if not self.top:
                self._seen.append((logits.shape[-1], chosen.shape[-1]))
            if self._experts is not None:
                own = chosen.view(self._rows, self._queries, -1).to(torch.int16)
                self._experts[layer, :, 0, -own.shape[1] :].copy_(own)

        return keep
