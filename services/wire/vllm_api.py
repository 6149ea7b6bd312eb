"""HTTP bodies of vLLM's routes (0.32) on a rollout server, so that trainers and clients written for vLLM work.

    POST /inference/v1/generate   GenerateCall ──► GenerateAnswer, or GenerateChunk … as server-sent events
    /pause /resume /abort_requests /init_weight_transfer_engine /start_weight_update /update_weights …

Calls are pydantic models that ignore unknown fields, as vLLM does. Answers of the busy route are msgspec structs, which
are encoded ten times faster (25 µs instead of 280 for 100 tokens with logprobs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictInt

from services.wire.openai_api import PromptLogprob
from services.wire.rollout_api import Seed, TokenId
from services.wire.trajectory import VersionSpan

RequestId = Annotated[str, Field(min_length=1, max_length=256)]


class Call(BaseModel):
    """A body of vLLM's making: fields that we do not know are ignored."""

    model_config = ConfigDict(extra="ignore")


class SamplingCall(Call):
    """vLLM's SamplingParams. Fields that change neither sampling nor the answer are ignored.

    Those from `stop` on would change it and are not supported: anything but their neutral value is refused (400).
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    """Left out: as many as fit the model."""
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0)
    seed: Seed | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=4096)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, lt=1 << 31)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """None: no logprobs in the answer. k: the sampled token's, and `max(k, 1)` entries of `top_logprobs`, it among them."""
    prompt_logprobs: StrictInt | None = None
    """0: those of the prompt's own tokens, in a whole answer outside sessions. Other numbers are refused (400)."""

    stop: JsonValue = None
    structured_outputs: JsonValue = None
    guided_decoding: JsonValue = None
    logit_bias: JsonValue = None
    allowed_token_ids: JsonValue = None
    bad_words: JsonValue = None
    logprob_token_ids: JsonValue = None
    prompt_logprob_token_ids: JsonValue = None
    thinking_token_budget: JsonValue = None
    repetition_detection: JsonValue = None
    trace_decode_token_ids: JsonValue = None
    extra_args: JsonValue = None
    watermarking: JsonValue = None


class StreamOptions(Call):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    version_spans: bool | None = False
    """Ours: `version_spans` with every chunk."""


class GenerateCall(Call):
    """`POST /inference/v1/generate`: generate continuations of `token_ids`.

    `model` and `priority` are read and ignored: a server has one model and serves who came first. The last five fields
    are not supported: anything but None (for `output_mode`: `tokens`) is refused (400).
    """

    request_id: RequestId | None = None
    """Left out: the server makes one. It must not be in flight already; `/abort_requests` takes it."""
    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: SamplingCall
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: int = Field(default=0, ge=-(1 << 63), lt=1 << 63)
    return_token_ids: bool | None = None
    """Answer with `prompt_token_ids` too; in a stream on its first chunk."""
    resumed: int = Field(default=0, ge=0)
    """Ours: the last so many of `token_ids` were sampled by an earlier try of this call, and count as output."""
    first_index: int = Field(default=0, ge=0)
    """Ours: a seed generates as it would for the samples from this one on of an unbroken call."""

    output_mode: str | None = None
    features: JsonValue = None
    content_parts: JsonValue = None
    kv_transfer_params: JsonValue = None
    ec_transfer_params: JsonValue = None


class TokenLogprob(msgspec.Struct):
    """`token` is `token_id:N`. `rank`: 1 for the likeliest; None where it is not known."""

    token: str
    token_id: int
    logprob: float
    rank: int | None


class SampledLogprob(msgspec.Struct):
    """A sampled token. `top_logprobs`: itself and then the likeliest others, best first."""

    token: str
    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[TokenLogprob]


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of a prompt None (the first one) or its own entry, by its id."""


class Logprobs(msgspec.Struct):
    """One entry a sampled token, finite, of the distribution really sampled from."""

    content: list[SampledLogprob]


class WeightVersionSpan(msgspec.Struct):
    """Output tokens `start … end − 1` were sampled by the weights labelled `version`."""

    version: str
    start: int
    end: int


def weight_spans(versions: Sequence[tuple[int, int]] | None, length: int) -> list[WeightVersionSpan] | None:
    """`policy_versions` of a sample of `length` tokens as vLLM writes them; None where they are not known."""
    if versions is None:
        return None
    ends = [*(start for _, start in versions), length][1:]
    return [WeightVersionSpan(str(version), start, end) for (version, start), end in zip(versions, ends, strict=True)]


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class Choice(msgspec.Struct, kw_only=True):
    """One sample; in a stream, the tokens since the sample's last chunk, `finish_reason` set on its final one.

    `weight_versions` (vLLM's) and `policy_versions` (ours: (version, its first output token)) say the same over the whole
    sample; in a stream they come with the final chunk.
    """

    index: int
    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: int | None = None
    """The stop token that ended the sample, if it is not an end-of-sequence token of the model."""
    weight_versions: list[WeightVersionSpan] | None = None
    policy_versions: list[tuple[int, int]] | None = None


class ChunkChoice(Choice, kw_only=True):
    """`version_spans`: over this chunk's tokens, for who asks (`StreamOptions`)."""

    version_spans: list[VersionSpan] | msgspec.UnsetType = msgspec.UNSET


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """`prompt_logprobs`: only where they were asked for."""

    request_id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    output_mode: Literal["tokens"] = "tokens"


class GenerateChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. The last one has no choices and the usage, if `stream_options` asked for it."""

    request_id: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    output_mode: Literal["tokens"] = "tokens"


class AbortRequests(Call):
    """No ids: every request in flight."""

    request_ids: list[str] | None = None


class PauseAnswer(BaseModel):
    status: Literal["paused", "resumed"]


class IsPaused(BaseModel):
    is_paused: bool


class AbortAnswer(BaseModel):
    status: Literal["aborted"] = "aborted"
    aborted: int


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["rollmesh"] = "rollmesh"
    root: str
    max_model_len: int
    """Prompt and answer together may have as many tokens."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class InitWeightTransfer(Call):
    """`{"init_info": {"backend": "rollmesh"}}`: rollmesh's own transport is the only one."""

    init_info: dict[str, JsonValue]


class ManifestInfo(Call):
    manifest: str = Field(min_length=1)
    """Base64 of an encoded `weight_bus.manifest.manifest.Manifest`."""


class UpdateWeights(Call):
    update_info: ManifestInfo


class FinishWeightUpdate(Call):
    weight_version: str | None = None
    """If given, it must be the version of the manifest."""


class UpdateWeightVersion(Call):
    new_version: str


class Message(BaseModel):
    message: str


class WeightInfo(BaseModel):
    weight_version: str
    """The policy version that the next token will be sampled with."""


class WeightCheck(Call):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None
    """For `compare`: what `checksum` answered, here or on another server."""


class Checksums(BaseModel):
    checksums: dict[str, str]
    """`root`: digest of the bytes that are really served, as in the manifest."""


class Comparison(BaseModel):
    match: bool
    mismatches: list[str]


class WorldSize(BaseModel):
    world_size: int
