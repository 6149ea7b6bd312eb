"""HTTP bodies of the OpenAI API: what existing agents send, and what their clients read.

Names and meanings are OpenAI's; the extra sampling fields, `return_token_ids` and `return_tokens_as_token_ids` are vLLM's.
Unknown fields are ignored, as OpenAI's clients expect. Fields that would change the prompt or what is sampled, and that are
not supported, are named in `unsupported`, so that they can be refused instead of ignored (`services.wire.openai_fields`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.wire import openai_fields
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
        return openai_fields.refused(self.model_extra or {})


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

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        return found if self.tool_choice in (None, "auto", "none") else [*found, "tool_choice"]


class CompletionCall(Sampled):
    """`POST …/v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = None
    """As many as are answered: nothing is sampled and thrown away."""

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


class CompletionChoice(TokenFields):
    index: int
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
