"""A tiny policy that chats: a byte-level BPE with Qwen3's markers, a ChatML template and a Qwen3-type model.

    256 bytes ── 80-odd merges (so that most texts have many tokenisations) ── 9 markers

The template says what Qwen3's says, in fewer words. Building tokenizer and model takes milliseconds; nothing is trained.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are not special, as in Qwen3: they show when special tokens are left out."""
MAX_MODEL_LEN = 2048

_WORDS = (
    *("Ġthe", "Ġand", "Ġto", "Ġof", "Ġin", "Ġis", "Ġweather", "Ġanswer", "Ġcall", "Ġnumber", "user", "assistant"),
    *(
        "system",
        "name",
        "arguments",
        "function",
        "tool",
        "city",
        '":',
        '",',
        "}}",
        "ing",
        "er",
        "ed",
        "ĠĠ",
        "ĊĊ",
        ".Ċ",
        "}Ċ",
    ),
)
"""Words of one token each, in the byte-level alphabet (Ġ is a space, Ċ a line break); so is each of their beginnings."""

CHAT_TEMPLATE = """\
{%- set turns = messages %}
{%- set system = "" %}
{%- if messages and messages[0].role == "system" %}
    {%- set system = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- if system or tools %}
    {{- "<|im_start|>system\\n" + system }}
    {%- if tools %}
        {{- "\\n\\n" if system else "" }}
        {{- "Tools:" }}
        {%- for tool in tools %}
            {{- "\\n" + (tool | tojson) }}
        {%- endfor %}
        {{- '\\nTo call one: <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' }}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in turns %}
    {%- if message.role in ("user", "system") %}
        {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>assistant\\n" }}
        {%- if message.reasoning_content %}
            {{- "<think>\\n" + message.reasoning_content + "\\n</think>\\n\\n" }}
        {%- endif %}
        {{- message.content or "" }}
        {%- for call in message.tool_calls or [] %}
            {{- "" if loop.first and not message.content else "\\n" }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- "}\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif message.role == "tool" %}
        {{- "<|im_start|>user" if loop.first or loop.previtem.role != "tool" else "" }}
        {{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
        {{- "<|im_end|>\\n" if loop.last or loop.nextitem.role != "tool" else "" }}
    {%- else %}
        {{- raise_exception("this template knows no role " + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""


def build_chat_tokenizer() -> PreTrainedTokenizerFast:
    """A fresh tokenizer with the chat template; any text encodes, and encoding then decoding gives the text back."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
    )


@cache
def _tokenizer_json() -> str:
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END_OF_TEXT, TURN_START, TURN_END)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKERS])
    text: str = tokenizer.to_str()
    return text


def build_chat_model(seed: int, *, hidden_size: int = 64, layers: int = 2) -> Qwen3ForCausalLM:
    """A freshly initialised Qwen3-type model in float32 for the tokenizer; the same seed gives the same bytes."""
    from trainer.sft.tiny_model import build_model

    return build_model(seed, hidden_size=hidden_size, layers=layers, tokenizer=build_chat_tokenizer())


def save_chat_policy(folder: Path, seed: int = 0) -> None:
    """Write model, tokenizer and chat template as one Hugging Face folder."""
    build_chat_model(seed).save_pretrained(folder)
    build_chat_tokenizer().save_pretrained(folder)
