"""What becomes of each field of an OpenAI or vLLM (0.32) request that is not served. Pure; one table, in one place.

    served          a field of `services.wire.openai_api.ChatCall` or `CompletionCall`
    ignored         it changes neither the prompt nor what is sampled, and of the answer at most which fields it has
    refused         it changes more, which nobody can do here; silence would be wrong training data: HTTP 400 by name
    of the template refused where the model's chat template heeds it, else without effect (`reasoning_effort`)

A value that means the same as leaving the field out is never refused. Fields that stand in neither table are unknown, also
to vLLM, and ignored as OpenAI's clients expect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

IGNORED: Mapping[str, str] = {
    "audio": "how speech sounds: `modalities` asks for it",
    "cache_salt": "caching alone; the engine's caches are salted with the policy version",
    "include_reasoning": "reasoning is a field of its own in the answer",
    "length_penalty": "of beam search alone",
    "media_io_kwargs": "of images and audio, which are refused in messages",
    "metadata": "a note",
    "mm_payload": "of vLLM's render routes",
    "mm_processor_kwargs": "of images and audio, which are refused in messages",
    "parallel_tool_calls": "of several calls an answer shows all: what was sampled is not cut",
    "prediction": "speed alone",
    "priority": "scheduling: who came first is served first",
    "prompt_cache_key": "caching alone",
    "prompt_cache_retention": "caching alone",
    "request_id": "the server names its answers itself",
    "return_mm_kwargs": "of vLLM's render routes",
    "return_prompt_text": "a field of the answer that is missing here: ask for `return_token_ids`",
    "return_token_offsets": "of vLLM's render routes",
    "routed_experts_prompt_start": "routed experts are not answered",
    "safety_identifier": "a note",
    "service_tier": "scheduling",
    "session_id": "sessions are named by URL, key or header",
    "spaces_between_special_tokens": "of tokenizers that are not in use any more",
    "store": "a note",
    "stream_interval": "how a stream is cut into chunks",
    "truncation_side": "of `truncate_prompt_tokens` alone",
    "user": "a note",
}
"""Why each has no effect."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "ec_transfer_params": ({},),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "modalities": ([], ["text"]),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""The values of each, beside null, that mean the same as leaving it out. Here no special token is added to a prompt."""

_GUIDED = "guided_"


def refused(given: Mapping[str, Any]) -> list[str]:
    """The fields of `given` that ask for something that is not done here, in their order."""
    return [name for name, value in given.items() if value is not None and not _without_effect(name, value)]


def of_the_template(reasoning_effort: str) -> dict[str, Any]:
    """What the field tells a chat template, as in vLLM."""
    return {"reasoning_effort": reasoning_effort, "enable_thinking": reasoning_effort != "none"}


def _without_effect(name: str, value: Any) -> bool:
    same = REFUSED.get(name)
    if same is None:
        # Older versions of vLLM had more of these.
        return not name.startswith(_GUIDED)
    return _one_of(value, same)


def _one_of(value: Any, values: Iterable[Any]) -> bool:
    """JSON's 0 and false are two values, Python's are not."""
    return any(type(value) is type(each) and value == each for each in values)
