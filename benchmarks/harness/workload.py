"""The requests that every arm of the benchmark answers, as messages and as the tokens that they become.

One file holds them, so that the engine's process and whoever speaks to a server read the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout_server.chat.renderer import ChatRenderer
from services.wire.sampling import KvPolicy, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_WORDS = (
    "count",
    "add",
    "sum",
    "the",
    "step",
    "what",
    "left",
    "right",
    "then",
    "again",
    "number",
    "seven",
    "twelve",
    "carry",
)
_SYSTEM = "You are a careful assistant."

TIMED_KV_POLICY: KvPolicy = "keep"
"""Of every arm that is timed. Rounds ask the same again: what an engine remembered of the last one would be no work."""


class Exchange(msgspec.Struct, frozen=True):
    """One request. `token_ids`: the prompt that `messages` are rendered to."""

    messages: list[dict[str, str]]
    token_ids: list[int]
    max_tokens: int

    @property
    def sampling(self) -> SamplingParams:
        """Plain sampling; the end of a turn ends nothing, so that all arms generate the same number of tokens."""
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)

    def chat_body(self, *, stream: bool) -> dict[str, Any]:
        """The chat completion that asks for it."""
        body: dict[str, Any] = {"model": "policy", "messages": self.messages, "max_tokens": self.max_tokens}
        body |= {"temperature": 1.0, "ignore_eos": True}
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})

    def token_body(self) -> dict[str, Any]:
        """The call of the token route that asks for it."""
        sampling = {"max_tokens": self.max_tokens, "temperature": 1.0, "ignore_eos": True}
        return {"token_ids": self.token_ids, "sampling_params": sampling}


def make_workload(model: Path, *, count: int, max_tokens: int, seed: int) -> list[Exchange]:
    """`count` different questions of 10 to 30 words (about 100 to 240 tokens as prompts). The same seed gives the same.

    Answers have half to one and a half times `max_tokens`. With equal lengths all requests of an arm would end in one
    decode step and begin in the next: one arm's prefills would be huge, another's not, and that would be measured.
    """
    chat, rng = ChatRenderer.from_folder(model), random.Random(seed)
    exchanges = []
    for number in range(count):
        question = " ".join([f"Question {number}:", *rng.choices(_WORDS, k=rng.randint(10, 30))])
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
        length = rng.randint(max(1, max_tokens // 2), max_tokens + max_tokens // 2)
        exchanges.append(Exchange(messages, chat.render(messages), length))
    return exchanges


def make_group_questions(model: Path, *, count: int, max_tokens: int, seed: int) -> list[Exchange]:
    """`count` long questions (about 300 tokens) below one system prompt (about 80).

    One a group: all siblings ask the same. Another seed gives other questions below another system prompt.
    """
    chat, rng = ChatRenderer.from_folder(model), random.Random(seed)
    system = " ".join([_SYSTEM, f"Rules {seed}:", *rng.choices(_WORDS, k=6)])
    exchanges = []
    for _ in range(count):
        question = " ".join(rng.choices(_WORDS, k=rng.randint(30, 42)))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        exchanges.append(Exchange(messages, chat.render(messages), max_tokens))
    return exchanges


def save_workload(exchanges: list[Exchange], path: Path) -> None:
    path.write_bytes(msgspec.json.encode(exchanges))


def load_workload(path: Path) -> list[Exchange]:
    return msgspec.json.decode(path.read_bytes(), type=list[Exchange])


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
    """Write a random Qwen3 model with byte-level tokenizer and ChatML template; returns the number of parameters.

    It gives engines the work of a model of a given size, without a download.

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


def distinct_prefixes(prompts: Iterable[Sequence[int]]) -> int:
    """The fewest tokens that a fleet must prefill: the nodes of the trie of `prompts`, one for each distinct prefix.

    a b c d          a─b─c─d
    a b c e f   ──►      └─e─f      6 nodes, though the prompts have 13 tokens
    a b c d
    """
    ordered = sorted([list(prompt) for prompt in prompts])
    # In order, a prompt shares with none before it more than with the one just before it.
    return sum(len(now) - _shared(before, now) for before, now in pairwise([[], *ordered]))


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


if __name__ == "__main__":
    _main()
