"""What a reward model's server is asked and answers: vLLM's `/score` and `/classify` (vllm.entrypoints.pooling).

| api      | asked                                       | a sample's value                            |
|----------|---------------------------------------------|---------------------------------------------|
| score    | `text_1`, `text_2`: prompts and answers     | `data[i].score`                             |
| classify | `input`: texts made of both                 | `data[i].probs[class_index]`                |

`use_activation` says whether the model's own sigmoid or softmax is applied; reward models are mostly trained without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from services.reward_settings import ModelScoring
from services.rewards.worker_wire import Sample
from services.wire.errors import WireError


class _ScoreRequest(msgspec.Struct, omit_defaults=True):
    text_1: list[str]
    text_2: list[str]
    use_activation: bool
    model: str | None = None


class _ClassifyRequest(msgspec.Struct, omit_defaults=True):
    input: list[str]
    use_activation: bool
    model: str | None = None


class _Scored(msgspec.Struct):
    index: int
    score: float


class _Classified(msgspec.Struct):
    index: int
    probs: list[float]


class _ScoreAnswer(msgspec.Struct):
    data: list[_Scored]


class _ClassifyAnswer(msgspec.Struct):
    data: list[_Classified]


def encode_batch(model: ModelScoring, samples: Sequence[Sample]) -> bytes:
    """The body for a batch."""
    prompts, answers = [prompt_text(sample) for sample in samples], [sample.answer for sample in samples]
    if model.api == "score":
        return msgspec.json.encode(_ScoreRequest(prompts, answers, model.activation, model.model))
    texts = [model.text.format(prompt=prompt, answer=said) for prompt, said in zip(prompts, answers, strict=True)]
    return msgspec.json.encode(_ClassifyRequest(texts, model.activation, model.model))


def decode_batch(model: ModelScoring, content: bytes, count: int) -> list[float]:
    """The values of a batch of `count` samples, in their order. Raises WireError for any other answer."""
    try:
        if model.api == "score":
            values = {each.index: each.score for each in msgspec.json.decode(content, type=_ScoreAnswer).data}
        else:
            classified = msgspec.json.decode(content, type=_ClassifyAnswer).data
            values = {each.index: each.probs[model.class_index] for each in classified}
        found = [values[index] for index in range(count)]
    except (msgspec.MsgspecError, KeyError, IndexError) as error:
        what = f"{model.url} answered something else than {count} values of /{model.api} ({error!r})"
        raise WireError(what, "see that it serves this api, and class_index") from error
    if not all(map(math.isfinite, found)):
        raise WireError(f"{model.url} answered a value that is no finite number", "see that server's log")
    return found


def prompt_text(sample: Sample) -> str:
    """The prompt, or the contents of the messages, a line each."""
    if sample.prompt is not None:
        return sample.prompt
    return "\n".join(str(message.get("content") or "") for message in sample.messages or ())
