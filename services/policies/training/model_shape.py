"""The sizes of a decoder that its memory and its work follow from, read from what its config.json says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NORMS_OF_HEADS = ("qwen3", "olmo2", "gemma3")
"""Model types, by how they begin, that normalise queries and keys."""


@dataclass(frozen=True)
class ModelShape:
    """`hidden`: width of the residual stream; `heads`, `kv_heads` of `head_dim`; `feed_forward`: width of a dense layer's.

    `experts`: of each layer, 0 where layers are dense, `chosen` for each token, each of width `expert_width`. `tied`:
    embedding and head are one matrix. `head_norms`: queries and keys are normalised.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    expert_width: int = 0
    head_norms: bool = False

    @property
    def queries(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def attention(self) -> int:
        """Weights of a layer's four projections."""
        return 2 * self.hidden * (self.queries + self.keys)

    @property
    def products(self) -> int:
        """Weights of a layer that tokens are multiplied with: all experts."""
        if self.experts:
            return self.attention + self.hidden * self.experts * (1 + 3 * self.expert_width)
        return self.attention + 3 * self.hidden * self.feed_forward

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        return self.products + 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)

    @property
    def embedding(self) -> int:
        """Weights of the embedding, and of the head as many."""
        return self.vocabulary * self.hidden

    @property
    def outer(self) -> int:
        """Weights of no layer: embedding, last norm, head."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outer

    def adapters(self, rank: int) -> int:
        """Weights of low-rank adapters on a layer's linear layers: of its projections, and of a dense feed-forward."""
        wide = [
            (self.hidden, self.queries),
            (self.hidden, self.keys),
            (self.hidden, self.keys),
            (self.queries, self.hidden),
        ]
        if not self.experts:
            wide += [(self.hidden, self.feed_forward)] * 3
        return rank * sum(into + out for into, out in wide)


def shape_of(configuration: Mapping[str, Any]) -> ModelShape:
    """Of a config.json in `transformers`' usual words; of a multimodal one the part for text.

    Raises ValueError where it does not say what is needed.
    """
    text = configuration.get("text_config")
    said = {**configuration, **text} if isinstance(text, Mapping) else configuration

    def number(*names: str) -> int | None:
        return next((value for name in names if isinstance(value := said.get(name), int)), None)

    def needed(*names: str) -> int:
        found = number(*names)
        if found is None:
            raise ValueError(f"it does not say {names[0]}")
        return found

    hidden, heads = needed("hidden_size", "n_embd"), needed("num_attention_heads", "n_head")
    experts = number("num_experts", "num_local_experts", "n_routed_experts") or 0
    width = number("intermediate_size", "n_inner") or 4 * hidden
    kind = str(said.get("model_type", ""))
    return ModelShape(
        hidden=hidden,
        layers=needed("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("head_dim") or hidden // heads,
        feed_forward=width,
        vocabulary=needed("vocab_size"),
        tied=bool(said.get("tie_word_embeddings", False)),
        experts=experts,
        chosen=(number("num_experts_per_tok") or 1) if experts else 0,
        expert_width=(number("moe_intermediate_size") or width) if experts else 0,
        head_norms=kind.startswith(_NORMS_OF_HEADS),
    )
