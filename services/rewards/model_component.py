"""Reward component of a reward model: samples go in batches to an HTTP server, with retries where they may help.

A batch that is refused for what is in it is halved until the samples at fault stand alone, so that one that is too long for
the model takes no other with it. A batch that is not answered is sent again until its samples' deadline.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import msgspec
import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from services.config.rewards import ModelScoring, RewardComponent
from services.policies.rewards import BatchQueue, BatchRules, Failure, RewardFailure
from services.rewards.component import Score, settle
from services.rewards.sandbox.protocol import Sample
from services.security.connections import kept_connections
from services.security.keys import read_key
from services.security.tls import PUBLIC, Trust
from services.wire.errors import UNDECODABLE, RollmeshError, UntrustedError, WireError

_log = structlog.get_logger()
_CONNECT_WITHIN_S = 5.0
_AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT)
_FAULT_OF_A_SAMPLE = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
_back_off = wait_random_exponential(multiplier=0.1, max=5.0)


class _NoAnswerError(RollmeshError):
    """Worth sending again."""


class _RefusedError(RollmeshError):
    """Not worth it: a sample of the batch is at fault."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    sample: Sample
    future: asyncio.Future[Score]
    until: float
    """Seconds of the loop's clock."""


class ModelScorer:
    """Scores by one model. `note_batch` is told the size of every batch that is sent."""

    def __init__(
        self,
        component: RewardComponent,
        max_waiting: int,
        note_batch: Callable[[int], None],
        trust: Trust = PUBLIC,
    ) -> None:
        assert component.model is not None
        self._trust = trust
        self._name, self._model, self._deadline_s = component.name, component.model, component.deadline_s
        rules = BatchRules(
            largest=self._model.max_batch,
            linger_s=self._model.linger_ms / 1000.0,
            at_once=self._model.at_once,
            capacity=max_waiting,
        )
        self._queue: BatchQueue[_Waiting] = BatchQueue(rules)
        self._changed = asyncio.Event()
        self._note_batch = note_batch
        self._url = f"{self._model.url.rstrip('/')}/{self._model.api}"
        key = None if self._model.key_file is None else read_key(self._model.key_file)
        self._headers = {"content-type": "application/json"} | (
            {} if key is None else {"authorization": f"Bearer {key}"}
        )
        self._running = False
        self.not_confined: list[str] = []

    @property
    def full(self) -> bool:
        return self._queue.full

    def not_ready(self) -> list[str]:
        return [] if self._running else [f"{self._name} has not started yet"]

    def submit(self, sample: Sample) -> asyncio.Future[Score]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Score] = loop.create_future()
        item = _Waiting(sample, future, loop.time() + self._deadline_s)
        if not self._queue.offer(item, time.monotonic()):
            raise RollmeshError(f"{self._name} was given a sample while it was full")

        def gave_up(done: asyncio.Future[Score]) -> None:
            if done.cancelled():
                self._queue.withdraw(item)

        future.add_done_callback(gave_up)
        self._changed.set()
        return future

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_WITHIN_S)
        connector = kept_connections(self._trust.verify)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers) as http:
            async with asyncio.TaskGroup() as sending:
                self._running = True
                while True:
                    await self._until_due()
                    if batch := self._queue.take(time.monotonic()):
                        sending.create_task(self._send(http, batch), name=f"rewards-{self._name}")

    async def _until_due(self) -> None:
        while (due_in := self._queue.due_in(time.monotonic())) != 0.0:
            self._changed.clear()
            try:
                async with asyncio.timeout(due_in):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _send(self, http: aiohttp.ClientSession, batch: list[_Waiting]) -> None:
        try:
            await self._score(http, batch)
        finally:
            self._queue.done()
            self._changed.set()

    async def _score(self, http: aiohttp.ClientSession, batch: list[_Waiting]) -> None:
        try:
            values = await self._ask(http, batch)
        except _RefusedError as error:
            if len(batch) > 1:
                middle = len(batch) // 2
                await self._score(http, batch[:middle])
                await self._score(http, batch[middle:])
                return
            settle(batch[0].future, Failure(RewardFailure.REFUSED, str(error)))
        except (_NoAnswerError, UntrustedError, WireError) as error:
            _log.warning("reward model does not answer", component=self._name, samples=len(batch), why=str(error))
            for item in batch:
                settle(item.future, Failure(RewardFailure.UNREACHABLE, str(error)))
        else:
            for item, value in zip(batch, values, strict=True):
                settle(item.future, value)

    async def _ask(self, http: aiohttp.ClientSession, batch: list[_Waiting]) -> list[float]:
        self._note_batch(len(batch))
        body = encode_batch(self._model, [item.sample for item in batch])
        left_s = max(item.until for item in batch) - asyncio.get_running_loop().time()
        asking = AsyncRetrying(
            retry=retry_if_exception_type(_NoAnswerError), wait=_back_off, stop=stop_after_delay(left_s), reraise=True
        )
        try:
            async with asyncio.timeout(left_s):
                content: bytes = await asking(self._post, http, body)
        except TimeoutError as error:
            raise _NoAnswerError(f"{self._url} did not answer in time") from error
        return decode_batch(self._model, content, len(batch))

    async def _post(self, http: aiohttp.ClientSession, body: bytes) -> bytes:
        try:
            async with http.post(self._url, data=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            if (refused := self._trust.refusal(self._url, error)) is not None:
                raise refused from error
            raise _NoAnswerError(f"{self._url} cannot be reached ({str(error) or repr(error)})") from error
        if response.status < HTTPStatus.BAD_REQUEST:
            return content
        what = f"{self._url} answered {response.status} ({content[:500].decode(errors='replace')})"
        if response.status in _AGAIN or response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _NoAnswerError(what)
        if response.status in _FAULT_OF_A_SAMPLE:
            raise _RefusedError(what)
        raise WireError(what, "see the component's url, model and key_file")


def describe_model(model: ModelScoring) -> str:
    """For people."""
    return f"/{model.api} of {model.url}" + (f", model {model.model}" if model.model else "")


# What a reward model's server is asked and answers: vLLM's `/score` and `/classify` (vllm.entrypoints.pooling).
#
# | api      | asked                                       | a sample's value                            |
# |----------|---------------------------------------------|---------------------------------------------|
# | score    | `text_1`, `text_2`: prompts and answers     | `data[i].score`                             |
# | classify | `input`: texts made of both                 | `data[i].probs[class_index]`                |
#
# `use_activation` says whether the model's own sigmoid or softmax is applied; reward models are mostly trained
# without.


class _ScoreRequest(msgspec.Struct, omit_defaults=True):
    text_1: list[str]
    text_2: list[str]
    use_activation: bool
    model: str | None = None


class _ClassifyRequest(msgspec.Struct, omit_defaults=True):
    input: list[str]
    use_activation: bool
    model: str | None = None


class _ScoreReply(msgspec.Struct):
    index: int
    score: float


class _Classified(msgspec.Struct):
    index: int
    probs: list[float]


class _ScoreAnswer(msgspec.Struct):
    data: list[_ScoreReply]


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
    except (*UNDECODABLE, KeyError, IndexError) as error:
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
