"""A random policy that chats, made on the spot: Qwen3's architecture, a byte-level vocabulary, ChatML.

What it says means nothing. It is there so that an engine does the work of a model of a given size, on any machine and
without a download.

python -m rollout_server.bench.policy FOLDER HIDDEN_SIZE LAYERS SEED       with a tied output head
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_MODEL_LEN = 2048
HEAD_DIM = 32

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_random_policy(folder: Path, *, hidden_size: int, layers: int, seed: int, tied: bool = False) -> int:
    """Write model, tokenizer and chat template as one Hugging Face folder; returns the number of parameters.

    The same sizes and seed give the same bytes. `hidden_size` must be a multiple of 32. `tied`: the output head is the
    embedding.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    # A progress bar for a file of some megabytes would only stand between the benchmark's own lines.
    logging.disable_progress_bar()
    tokenizer = _tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=hidden_size // HEAD_DIM,
        head_dim=HEAD_DIM,
        intermediate_size=3 * hidden_size,
        tie_word_embeddings=tied,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END_OF_TEXT, TURN_START, TURN_END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=_CHATML,
        model_max_length=MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
    )


def _main() -> None:
    import sys

    folder, hidden_size, layers, seed = sys.argv[1:]
    save_random_policy(Path(folder), hidden_size=int(hidden_size), layers=int(layers), seed=int(seed), tied=True)


if __name__ == "__main__":
    _main()
