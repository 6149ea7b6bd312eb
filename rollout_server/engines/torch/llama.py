"""Models of the Llama type (Llama, Qwen3) as a `Decoder` without transformers: the built-in tasks' policy is one.

Importing any model of transformers imports torch's compiler, its distributed tensors and sympy: 1.6 s of CPU, more than a
third of a server's start. So these models' operations are written here, in transformers' order: the logits are the same
(tests compare them). What a folder may hold beyond that is left to transformers (`read_llama` returns None): any setting
that is not known to change nothing here, and weights under other names or of other sizes.

    ids ─► embed ─► ( norm ─► attention over the window ─► + ─► norm ─► gated feed-forward ─► + ) × layers ─► norm ─► logits
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from rollout_server.engines.torch.decoder import Decoder, mask_of, positions_of
from rollout_server.engines.torch.kv_cache import KvShape
from rollout_server.engines.torch.llama_config import LlamaConfig, read_config, read_ends, read_file_names

Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer's keys and values of this call; returns all that its queries may see."""
RememberOf = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The same, of the layer of that number."""


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps: Tensor
        self.register_buffer("_eps", torch.tensor(eps, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            # Five operations for eight: each costs more than its arithmetic where a model is small.
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            mean = torch.addcmul(self._eps, length, length, value=1.0 / self.weight.shape[0])
            return self.weight * (x * torch.rsqrt(mean))
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(x.dtype)


class _Matrix(nn.Module):
    """A linear layer or an embedding whose weights are not filled with random numbers first: they are loaded."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


# Modules are named, and stand in the order, as in transformers: so do the weights that are published.


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self._head_dim, self._kv_heads = config.head_dim, config.num_key_value_heads
        self._repeats = config.num_attention_heads // config.num_key_value_heads
        width, kv_width = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = _Matrix(width, config.hidden_size)
        self.k_proj = _Matrix(kv_width, config.hidden_size)
        self.v_proj = _Matrix(kv_width, config.hidden_size)
        self.o_proj = _Matrix(config.hidden_size, width)
        normed = config.model_type == "qwen3"
        self.q_norm = _Norm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = _Norm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, remember: Remember, single: bool
    ) -> Tensor:
        rows, count, _ = x.shape
        split = rows, count, -1, self._head_dim
        queries = _rotated(self.q_norm(self.q_proj(x).view(split)).transpose(1, 2), cos, sin)
        keys = _rotated(self.k_norm(self.k_proj(x).view(split)).transpose(1, 2), cos, sin)
        keys, values = remember(keys, self.v_proj(x).view(split).transpose(1, 2))
        seen = self._seen_by_one(queries, keys, values, mask) if single else self._seen(queries, keys, values, mask)
        attended: Tensor = self.o_proj(seen.transpose(1, 2).reshape(rows, count, -1))
        return attended

    def _seen(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        shared = self._repeats > 1
        if shared and keys.device.type != "cpu":
            # With a mask, the quick kernels of a GPU share no keys between heads. That of a CPU does, without the copies.
            keys, values = (part.repeat_interleave(self._repeats, dim=1) for part in (keys, values))
            shared = False
        return functional.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, scale=self._head_dim**-0.5, enable_gqa=shared
        )

    def _seen_by_one(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """As `_seen`, of one query a row: the heads that share keys stand where several queries would."""
        assert mask is not None
        grouped = (queries * self._head_dim**-0.5).reshape(-1, self._kv_heads, self._repeats, self._head_dim)
        shares = (torch.matmul(grouped, keys.transpose(-1, -2)) + mask).softmax(-1)
        return torch.matmul(shares, values).reshape(-1, self._kv_heads * self._repeats, 1, self._head_dim)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`sin`: that of each angle, its first half negative."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((second, first), dim=-1)
    # One operation, where that rounds as two do but for the last bit.
    return torch.addcmul(x * cos, turned, sin) if x.dtype is torch.float32 else (x * cos) + (turned * sin)


class _FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = _Matrix(config.intermediate_size, config.hidden_size)
        self.up_proj = _Matrix(config.intermediate_size, config.hidden_size)
        self.down_proj = _Matrix(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return fed


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _FeedForward(config)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, remember: Remember, single: bool
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, remember, single)
        fed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return fed


class _Trunk(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = _Matrix(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)


class LlamaDecoder(Decoder):
    """`tensors`: the weights by name. Raises RuntimeError where they are not those of `config`."""

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        ends: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.kind, self.dtype, self.device = config.model_type, dtype, device
        self.shape = KvShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.head_dim)
        self.vocabulary = self.outputs = config.vocab_size
        self.longest, self.ends, self._tied = config.max_position_embeddings, ends, config.tie_word_embeddings
        self.model = _Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = _Matrix(config.vocab_size, config.hidden_size)
        # Copies: what was read may be the file itself, mapped.
        own = {name: tensor.to(device, dtype, copy=True) for name, tensor in tensors.items()}
        self.load_state_dict(own, assign=True)
        self.eval().requires_grad_(False).to(device)
        # Matrix products are a quarter faster than a CPU's attention kernel, which takes queries by the block. Those of a
        # smaller dtype would round what that kernel keeps in float32.
        self.single = device.type == "cpu" and dtype is torch.float32
        even = torch.arange(0, config.head_dim, 2, dtype=torch.float, device=device)
        self._frequencies = 1.0 / (config.theta ** (even / config.head_dim))

    @property
    def weights(self) -> nn.Module:
        return self

    def forward(self, ids: Tensor, starts: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._head(self._over_window(ids, starts, columns, keys, values)[:, -1:])[:, -1]

    def of_one(self, ids: Tensor, starts: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        newest = columns[-1:]
        unseen = (columns < starts.unsqueeze(1))[:, None, None]
        mask = torch.zeros(unseen.shape, device=ids.device).masked_fill(unseen, torch.finfo(torch.float32).min)
        written = _written(keys, values, 1)
        return self._head(self._layers(ids, positions_of(starts, newest), mask, written, single=True))[:, -1]

    def logits_of_all(self, ids: Tensor, starts: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._head(self._over_window(ids, starts, columns, keys, values))

    def plain(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self._layers(ids, positions, None, lambda _, keys, values: (keys, values))
        return self._head(x[:, -1:])[:, -1]

    def _over_window(self, ids: Tensor, starts: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries = columns[-ids.shape[1] :]
        mask = mask_of(starts, columns, queries, self.dtype)
        written = _written(keys, values, ids.shape[1])
        return self._layers(ids, positions_of(starts, queries), mask, written)

    def _layers(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        remember: RememberOf,
        *,
        single: bool = False,
    ) -> Tensor:
        """What goes into the last norm. `mask`: None sees all tokens up to the query's own. `single`: it is for one query
        a row, `of_one`."""
        angles = (positions[..., None].float() * self._frequencies).unsqueeze(1)
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        x = functional.embedding(ids, self.model.embed_tokens.weight)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, mask, partial(remember, index), single)
        return x

    def _head(self, x: Tensor) -> Tensor:
        head = self.model.embed_tokens if self._tied else self.lm_head
        logits: Tensor = head(self.model.norm(x))
        return logits.float()


def _written(keys: Tensor, values: Tensor, count: int) -> RememberOf:
    """Writes the last `count` columns of a window of these keys and values, and returns all of it."""

    def written(layer: int, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        own_keys, own_values = keys[layer], values[layer]
        own_keys.narrow(2, -count, count).copy_(new_keys)
        own_values.narrow(2, -count, count).copy_(new_values)
        return own_keys, own_values

    return written


def read_llama(folder: Path, dtype: torch.dtype, device: torch.device) -> LlamaDecoder | None:
    """The model in `folder`; None where it is, or may be, anything that is not written here."""
    config = read_config(folder)
    if config is None:
        return None
    try:
        return LlamaDecoder(config, _read_tensors(folder), dtype=dtype, device=device, ends=read_ends(folder, config))
    except (OSError, SafetensorError, RuntimeError):
        return None


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Raises OSError or SafetensorError where there are no whole safetensors files."""
    files = read_file_names(folder)
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
