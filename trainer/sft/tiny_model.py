"""A tiny policy in Hugging Face format: a Qwen3-type model of 115 k parameters and a character tokenizer.

Small enough to learn in seconds on one core, and a real `transformers` folder all the same: vLLM and the torch engine load
it as they would load a large one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789=+-*/<>()[]{}:;,.?! \nabcdefghijklmnopqrstuvwxyzHLC'"
PAD, END = "_", "$"
MAX_MODEL_LEN = 256
# 0.02, the default, is made for wide models: at this width warm starts stall on a plateau with it (2 of 4 seeds).
_INITIALIZER_RANGE = 0.1


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; `$` ends a sequence, `_` pads. 64 tokens in all."""
    vocabulary = {character: index for index, character in enumerate([PAD, END, *CHARACTERS])}
    vocabulary["<unk>"] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token="<unk>",
        model_max_length=MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    seed: int,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    tokenizer: PreTrainedTokenizerFast | None = None,
    vocabulary: int | None = None,
) -> Qwen3ForCausalLM:
    """A freshly initialised Qwen3-type model in float32 for `tokenizer` (`build_tokenizer`'s, unless given) and its longest
    sequence; the same seed gives the same bytes. `vocabulary`: of a larger one than the tokenizer's."""
    tokenizer = build_tokenizer() if tokenizer is None else tokenizer
    config = Qwen3Config(
        vocab_size=len(tokenizer) if vocabulary is None else vocabulary,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        head_dim=32,
        intermediate_size=3 * hidden_size,
        tie_word_embeddings=False,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=_INITIALIZER_RANGE,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save_policy(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write model and tokenizer as one Hugging Face folder."""
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
