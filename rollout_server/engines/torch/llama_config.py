"""Reads the description of a model folder, and says whether it is one of the plain Llama type: no torch here.

Every setting has a field with the values that `LlamaDecoder` is written for. Another setting or value may change logits:
a folder that has one is not read here (None), and transformers reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from services.wire.errors import UNDECODABLE

_Count = Annotated[int, msgspec.Meta(gt=0)]


class _Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rope_type: Literal["default"]
    rope_theta: float


class _Ends(msgspec.Struct, frozen=True):
    """What is read of a `generation_config.json`."""

    eos_token_id: int | list[int] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return end_ids(self.eos_token_id)


class LlamaConfig(_Ends, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `config.json` of a model that `LlamaDecoder` may be. One with any other setting is not decoded into this."""

    architectures: list[str]
    model_type: Literal["llama", "qwen3"]
    num_hidden_layers: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count
    head_dim: _Count
    vocab_size: _Count
    max_position_embeddings: _Count
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_parameters: _Rope | None = None
    rope_theta: float | None = None
    rope_scaling: None = None
    layer_types: list[Literal["full_attention"]] | None = None
    hidden_act: Literal["silu"] = "silu"
    pretraining_tp: Literal[1] = 1
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    # These change no logit.
    attention_dropout: object = None
    bos_token_id: object = None
    dtype: object = None
    initializer_range: object = None
    max_window_layers: object = None
    pad_token_id: object = None
    sliding_window: object = None
    torch_dtype: object = None
    transformers_version: object = None
    use_cache: object = None

    @property
    def theta(self) -> float:
        """The base of the rotary angles; 0 where none is given."""
        return (self.rope_theta or 0.0) if self.rope_parameters is None else self.rope_parameters.rope_theta

    @property
    def plain(self) -> bool:
        """Whether the settings that may have several values have the ones that `LlamaDecoder` is written for."""
        return (
            self.architectures == [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.model_type]]
            and not (self.attention_bias or self.mlp_bias or self.use_sliding_window)
            and self.num_attention_heads % self.num_key_value_heads == 0
            and self.theta > 0.0
        )


def is_llama(folder: Path) -> bool:
    """Whether `folder` says that it holds such a model."""
    return read_config(folder) is not None


def read_config(folder: Path) -> LlamaConfig | None:
    """None for any other model, and where there is none."""
    config = _read(folder / "config.json", LlamaConfig, None)
    # An adapter beside the weights would change them.
    adapted = (folder / "adapter_config.json").exists()
    return None if config is None or adapted or not config.plain else config


def read_ends(folder: Path, config: LlamaConfig) -> tuple[int, ...]:
    """The ids that end an answer: the generation config's, else the model config's."""
    generation = _read(folder / "generation_config.json", _Ends, _Ends())
    return generation.ids or config.ids


def read_file_names(folder: Path) -> list[str]:
    """Of the safetensors files that hold the weights, in order. None of them need be there."""
    whole = "model.safetensors"
    index = None if (folder / whole).exists() else _read(folder / f"{whole}.index.json", _Index, None)
    return [whole] if index is None else sorted(set(index.weight_map.values()))


def end_ids(found: int | list[int] | None) -> tuple[int, ...]:
    """An `eos_token_id`, which is one, several or none."""
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


_Read = TypeVar("_Read")
_Else = TypeVar("_Else")


def _read(file: Path, kind: type[_Read], otherwise: _Else) -> _Read | _Else:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, *UNDECODABLE):
        return otherwise
