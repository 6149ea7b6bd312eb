"""Any causal language model of transformers as a `Decoder`: the model's own code, over our cache, masks and positions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.utils import logging as transformers_logging

from rollout_server.engines.torch.decoder import Decoder, mask_of, positions_of
from rollout_server.engines.torch.kv_cache import KvCache, KvShape
from rollout_server.engines.torch.llama_config import end_ids
from rollout_server.engines.torch.routing import Routing
from services.host.models import check_code
from services.wire.errors import NoModelError, UsageError
from weight_bus.manifest.published import PublishedNames


class TransformersDecoder(Decoder):
    """Raises UsageError, when made, for an architecture whose cache is not plain keys and values, or whose weights cannot
    be replaced in place by those that its folder names."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, *, keep_experts: bool = False) -> None:
        """`keep_experts`: write down which experts the layers choose. Raises UsageError where that cannot be seen."""
        super().__init__()
        self.model = model
        self._routing = Routing(model) if keep_experts else None
        self.kind, self.dtype, self.device = model.config.model_type, model.dtype, model.device
        self.shape = _kv_shape(model)
        if self._routing is not None:
            self.experts = self._routing.experts
            self.shape = replace(self.shape, expert_layers=self._routing.layers, expert_top=self._routing.top)
        config = model.config.get_text_config()
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.outputs = int(model.get_output_embeddings().weight.shape[0])
        self.longest = int(config.max_position_embeddings)
        # The generation config's ids, else the model config's.
        # The model config of a multimodal model may name them beside its text configuration.
        sources = (getattr(model, "generation_config", None), model.config, config)
        self.ends = next(filter(None, (end_ids(getattr(source, "eos_token_id", None)) for source in sources)), ())
        self._names = PublishedNames(model, dict(model.named_parameters()))
        self._window: int | None = None
        self._mask_kinds: dict[str, int | None] | None = None
        self._choose_masks()
        # An embedding with a padding index looks at a value when it is called. The index matters to gradients alone.
        embedding = model.get_input_embeddings()
        if isinstance(embedding, torch.nn.Embedding):
            embedding.padding_idx = None

    @property
    def weights(self) -> torch.nn.Module:
        named: torch.nn.Module = self.model
        return named

    def published(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self._names.views(tensors)

    def forward(
        self,
        ids: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        experts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._logits(ids, starts, columns, keys, values, experts, keep=1)[:, -1].float()

    def logits_of_all(
        self,
        ids: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        experts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # transformers' 0 keeps all. What a family does to its logits (caps, scales) it does in its own forward.
        return self._logits(ids, starts, columns, keys, values, experts, keep=0).float()

    def _logits(
        self,
        ids: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        experts: torch.Tensor | None,
        *,
        keep: int,
    ) -> torch.Tensor:
        queries = columns[-ids.shape[1] :]
        mask: Any
        if self._mask_kinds is None:
            mask = mask_of(starts, columns, queries, self.dtype, self._window)
        else:
            kinds = self._mask_kinds.items()
            mask = {kind: mask_of(starts, columns, queries, self.dtype, size) for kind, size in kinds}
        layers = [_WindowLayer(keys[layer], values[layer]) for layer in range(keys.shape[0])]
        written = nullcontext() if self._routing is None or experts is None else self._routing.into(experts, ids)
        with written:
            output = self.model(
                input_ids=ids,
                position_ids=positions_of(starts, queries),
                attention_mask=mask,
                past_key_values=Cache(layers=layers),
                use_cache=True,
                logits_to_keep=keep,
            )
        logits: torch.Tensor = output.logits
        return logits

    def plain(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[:, -1]
        return logits.float()

    def _choose_masks(self) -> None:
        """Newer models take a ready mask for each kind of layer in a dict, older ones a single ready mask."""
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise UsageError(
                f"a {config.model_type} model has layers of kind {', '.join(sorted(unknown))}, "
                "which keep no plain KV cache",
                "use the vllm engine for this architecture",
            )
        if not kinds:
            self._window = sliding
            return
        self._mask_kinds = {kind: sliding if kind == "sliding_attention" else None for kind in kinds}
        try:
            window = KvCache(self.shape, max_rows=1, dtype=self.dtype, device=self.device).scratch([1])
            ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            self(ids, window.starts, window.columns, *window.memories)
        except (AttributeError, TypeError):
            # It wants a tensor. Layers of one kind can share it.
            if len(kinds) > 1:
                raise UsageError(
                    f"a {config.model_type} model takes no ready mask for each kind of layer",
                    "use the vllm engine for this architecture",
                ) from None
            self._mask_kinds = None
            self._window = sliding if kinds == {"sliding_attention"} else None


class _WindowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the window, as the model's attention sees it."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Memory is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del args, kwargs
        last = slice(-key_states.shape[2], None)
        self.keys[:, :, last].copy_(key_states)
        self.values[:, :, last].copy_(value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def _kv_shape(model: PreTrainedModel) -> KvShape:
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    shapes = {
        (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        for layer in cache.layers
        if isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.ndim == 4
    }
    if len(shapes) != 1:
        raise UsageError(
            f"a {model.config.model_type} model does not cache keys and values of one shape in every layer",
            "use the vllm engine for this architecture",
        )
    heads, key_dim, value_dim = shapes.pop()
    return KvShape(layers=len(cache.layers), heads=heads, key_dim=key_dim, value_dim=value_dim)


def load_transformers(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    keep_experts: bool = False,
) -> TransformersDecoder:
    """The model in `folder`, whose own code is run with `trust_remote_code` alone.

    Raises UsageError where there is none, or one that cannot be decoded here, with its experts kept if they are to be.
    """
    check_code(folder, trusted=trust_remote_code)
    try:
        transformers_logging.disable_progress_bar()
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise NoModelError(folder, error) from error
    # transformers' own choice, where the model can.
    if model.config._attn_implementation != "sdpa":
        raise UsageError(
            f"the attention of a {model.config.model_type} model is not scaled_dot_product_attention, which the torch "
            "engine decodes with",
            "use the vllm engine for this architecture",
        )
    return TransformersDecoder(model.eval().requires_grad_(False).to(device), keep_experts=keep_experts)
