"""What the torch engine decodes with: a model, and one step of it over the KV window.

Decoder ──┬── LlamaDecoder           models of the Llama type, without transformers
          └── TransformersDecoder    any other causal language model
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollout_server.engines.torch.kv_cache import KvShape


class Decoder(torch.nn.Module):
    """`forward` is the step, in plain Python: `PolicyForward` checks and records it. One that keeps the choices of experts
    takes the window's memory for them as one more argument.

    `kind`: the model's type, for messages. `vocabulary`: how many token ids it takes. `outputs`: of how many it gives a
    logit. `longest`: tokens of a prompt and its answer together. `ends`: the ids that end an answer. `single`: a step of
    one token a row, as most are, is computed by `of_one`. `experts`: of how many each layer of a mixture chooses, where its
    choices are kept (`KvShape`); 0 else.
    """

    kind: str
    shape: KvShape
    dtype: torch.dtype
    device: torch.device
    vocabulary: int
    outputs: int
    longest: int
    ends: tuple[int, ...]
    single: bool = False
    experts: int = 0

    @property
    def weights(self) -> torch.nn.Module:
        """Whose parameters are served."""
        raise NotImplementedError

    def published(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """`tensors`, by the names of those parameters, as views by the names that they are published under."""
        return tensors

    def forward(
        self,
        ids: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """float32 logits `[rows, outputs]` of the last of `ids` `[rows, q]`; the rest are the parts of a `KvWindow`, of
        which it writes the last `q` columns."""
        raise NotImplementedError

    def of_one(
        self,
        ids: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """As `forward`, for `ids` `[rows, 1]` alone: in fewer or quicker operations."""
        raise NotImplementedError

    def logits_of_all(
        self,
        ids: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """As `forward`, but float32 `[rows, q, outputs]`: of every one of `ids`."""
        raise NotImplementedError

    def plain(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 logits `[rows, outputs]` after whole sequences `ids` `[rows, tokens]`, without any cache: what `forward`
        is compared with."""
        raise NotImplementedError


def positions_of(starts: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """int64 `[rows, q]`: where in its own sequence each row's token in the columns `queries` stands."""
    return (queries.unsqueeze(0) - starts.unsqueeze(1)).clamp_min(0)


def mask_of(
    starts: torch.Tensor, columns: torch.Tensor, queries: torch.Tensor, dtype: torch.dtype, window: int | None = None
) -> torch.Tensor:
    """Additive `[rows, 1, q, columns]`: 0 for own tokens up to the query, the dtype's lowest number elsewhere.

    `window`: how many tokens back a query sees; None: all. Not −inf: a padded query sees nothing at all, and its softmax
    must stay finite.
    """
    visible = (columns >= starts.unsqueeze(1)).unsqueeze(1) & (columns <= queries.unsqueeze(1)).unsqueeze(0)
    if window is not None:
        visible = visible & (columns > queries.unsqueeze(1) - window).unsqueeze(0)
    mask = torch.zeros(visible.shape, dtype=dtype, device=columns.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min).unsqueeze(1)
