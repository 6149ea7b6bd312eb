"""HTTP bodies of the OpenAI API: what existing agents send, and what their clients read.

Names and meanings are OpenAI's; the extra sampling fields, `return_token_ids` and `return_tokens_as_token_ids` are vLLM's.
Unknown fields are ignored, as OpenAI's clients expect. Fields that would change the prompt or what is sampled, and that are
not supported, are named in `unsupported`, so that they can be refused instead of ignored (`REFUSED`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictInt

from services.wire.rollout_api import SamplingFields, TokenId

StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class Lenient(BaseModel):
    """Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class FunctionDefinition(Lenient):
    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Lenient):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionCall(Lenient):
    name: str
    arguments: str


class ToolCall(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(BaseModel):
    """`text` parts are read; a conversation with any other kind is refused with 400."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, as newer versions of vLLM call it."""


class StreamOptions(Lenient):
    include_usage: bool | None = None


class Sampled(SamplingFields, Lenient):
    """What chat and text completions have in common. Fields that are not declared are kept, to be refused by name."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    """Any name: the session's policy answers."""
    n: int | None = Field(default=None, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: StopText | list[StopText] | None = Field(default=None)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    def unsupported(self) -> list[str]:
        """Fields that ask for a prompt, a generation or an answer that nobody makes here."""
        return refused(self.model_extra or {})


class ChatCall(Sampled):
    """`POST …/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[ToolDefinition] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """`auto` and `none`; a forced call cannot be sampled."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    reasoning_effort: str | None = Field(default=None, max_length=20)
    """Refused where the model's chat template heeds it."""
    prompt_logprobs: JsonValue = None
    """Refused: they are told of text completions."""

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        if self.prompt_logprobs is not None:
            found.append("prompt_logprobs")
        return found if self.tool_choice in (None, "auto", "none") else [*found, "tool_choice"]


class CompletionCall(Sampled):
    """`POST …/v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = None
    """As many as are answered: nothing is sampled and thrown away."""
    prompt_logprobs: StrictInt | None = None
    """0: the logprobs of the prompt's own tokens, in a whole answer outside sessions. Other numbers are refused (400)."""

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        return found if self.best_of in (None, self.n or 1) else [*found, "best_of"]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class TokenFields(BaseModel):
    """Only when `return_token_ids` was asked for."""

    token_ids: list[int] | None = None
    policy_versions: list[tuple[int, int]] | None = None
    """(policy version, offset of the first sampled token that it sampled)."""


class ChatChoice(TokenFields):
    index: int
    message: AnswerMessage
    finish_reason: str
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the answer, where it was not the model's own end."""
    logprobs: ChatLogprobs | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """Of each token the likeliest, and the sampled one in any case: N + 1 entries at most, one with `logprobs=0`."""
    text_offset: list[int]


@dataclass(slots=True)
class PromptLogprob:
    """One token of a prompt, as vLLM tells it. `logprob`: of the softmax of the logits as they are; −9999 for −inf.

    `rank`: 1 for the likeliest; None where it is not known. `decoded_token`: None on the token route.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionChoice(TokenFields):
    index: int
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """Only where they were asked for: None for the first token, for each other one its own entry, by its id."""


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


# What becomes of each field of an OpenAI or vLLM (0.32) request that is not served. Pure; one table, in one place.
#
#     served          a field of `ChatCall` or `CompletionCall`
#     ignored         it changes neither the prompt nor what is sampled, and of the answer at most which fields it has
#     refused         it changes more, which nobody can do here; silence would be wrong training data: HTTP 400 by name
#     of the template refused where the model's chat template heeds it, else without effect (`reasoning_effort`)
#
# A value that means the same as leaving the field out is never refused. Fields that stand in neither table are unknown,
# also to vLLM, and ignored as OpenAI's clients expect.

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
    "verbosity": "a wish that OpenAI's own models know; no chat template renders it",
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
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
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
