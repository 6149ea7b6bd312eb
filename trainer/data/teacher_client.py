"""HTTP client of a teacher: vLLM's text completions with the logprobs of the prompt's own tokens.

    POST {url}/v1/completions   {"model": …, "prompt": [t0 t1 t2 …], "max_tokens": 1, "prompt_logprobs": 0}
        ──► choices[0].prompt_logprobs   [null, {"t1": {"logprob": …}}, {"t2": …}, …]

Its logprobs are those of temperature 1, whatever the policy was sampled with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec
import numpy as np
import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential
from tokenizers import Tokenizer

from services.security.connections import kept_connections
from services.security.tls import PUBLIC, Trust
from services.wire.errors import UNDECODABLE, RollmeshError, UsageError, WireError
from trainer.algorithms.advantages.batch import Float64Array

_CONNECT_S = 5.0
# vLLM's server closes a connection after five idle seconds: the client must close it first, or reuse may fail.
_KEEP_ALIVE_S = 3.0
_AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT)
_PROBED = 64
"""Tokens whose text is compared."""

_log = structlog.get_logger()
_Answer = TypeVar("_Answer")
_back_off = wait_random_exponential(multiplier=0.1, max=5.0)


class TeacherError(RollmeshError):
    """The teacher tells no logprobs: the run has failed, and another start would come to the same (exit code 3)."""

    exit_code = 3
    code = "teacher"


class TeacherRefusedError(RollmeshError):
    """It does not take what it was asked; asked again, it would say the same."""

    code = "teacher_refused"


class _LostError(RollmeshError):
    """No answer: worth asking again."""


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Ask(msgspec.Struct, omit_defaults=True):
    model: str
    prompt: list[int] | str
    max_tokens: int = msgspec.field(default_factory=lambda: 1)
    temperature: float = msgspec.field(default_factory=lambda: 1.0)
    prompt_logprobs: int = msgspec.field(default_factory=lambda: 0)
    return_token_ids: bool = False


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True)
class TeacherServer:
    """Where a teacher is. `model`: its name there, None for the first that is listed; `key`: shown as bearer.

    `trust`: whose certificate it may show.
    """

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    trust: Trust = PUBLIC


class TeacherClient:
    """For one event loop."""

    def __init__(self, server: TeacherServer) -> None:
        # Clients of OpenAI's routes are given the address with or without it.
        self.url = server.url.rstrip("/").removesuffix("/v1")
        self._trust, self._name = server.trust, server.model
        self._headers = {"content-type": "application/json"}
        if server.key is not None:
            self._headers["authorization"] = f"Bearer {server.key}"
        self._http: aiohttp.ClientSession | None = None
        self.max_tokens: int | None = None
        """The longest prompt that it takes, once it was met; None where it does not say."""

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def meet(self, tokenizer: Tokenizer, within_s: float) -> None:
        """Wait until it answers, and see that it reads the same vocabulary.

        Raises TeacherError where it does not answer within `within_s`, UsageError for another model or vocabulary.
        """
        try:
            models = await self._asked(_Models, "GET", "/v1/models", None, within_s)
        except TeacherRefusedError as error:
            raise UsageError(
                f"no teacher is at {self.url} ({error})", "set trainer.teacher.url to a server of OpenAI's routes"
            ) from error
        listed = {card.id: card for card in models.data}
        self._name = self._name or next(iter(listed), None)
        if self._name not in listed:
            raise UsageError(
                f"the teacher at {self.url} serves no model {self._name or ''!r} (it lists {', '.join(listed) or 'none'})",
                "set trainer.teacher.model to one of them, or leave it out",
            )
        longest = listed[self._name].max_model_len
        # One token is sampled behind the prompt.
        self.max_tokens = None if longest is None else longest - 1
        await self._check_vocabulary(tokenizer, within_s)
        _log.info("teacher is met", url=self.url, model=self._name, longest_prompt=self.max_tokens)

    async def logprobs(self, prompt: Sequence[int], within_s: float) -> Float64Array:
        """float64 `[n − 1]`: of each token of `prompt` but the first, given those before it.

        Asked again while it does not answer. Raises TeacherError after `within_s`, and TeacherRefusedError.
        """
        asked = _Ask(self._name or "", list(prompt))
        answer = await self._asked(_Completion, "POST", "/v1/completions", msgspec.json.encode(asked), within_s)
        told = answer.choices[0].prompt_logprobs if answer.choices else None
        if told is None or len(told) != len(prompt):
            what = "none" if told is None else f"{len(told)}"
            raise TeacherRefusedError(
                f"the teacher at {self.url} tells {what} prompt_logprobs for a prompt of {len(prompt)} tokens",
                "give the address of a server that heeds prompt_logprobs: vLLM, or a rollout server",
            )
        try:
            entries = [(told[place] or {})[str(token)].logprob for place, token in enumerate(prompt) if place]
        except KeyError as error:
            raise WireError(
                f"the teacher at {self.url} tells no logprob of token {error}, which was asked for"
            ) from error
        found = np.array(entries, dtype=np.float64)
        if not bool(np.isfinite(found).all()):
            raise WireError(f"the teacher at {self.url} tells a logprob that is no finite number")
        return found

    async def _check_vocabulary(self, tokenizer: Tokenizer, within_s: float) -> None:
        """Its ids must reach as far as ours, and mean the same text, as far as it can be asked."""
        highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
        try:
            await self.logprobs([0, highest], within_s)
        except TeacherRefusedError as error:
            raise UsageError(
                f"the teacher does not take the token ids 0 and {highest} of the policy's vocabulary ({error})",
                "take a teacher with the policy's tokenizer",
            ) from error
        ids = [highest * place // _PROBED for place in range(_PROBED)]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        ours = tokenizer.encode(text, add_special_tokens=False).ids
        asked = _Ask(self._name or "", text, return_token_ids=True)
        try:
            answer = await self._asked(_Completion, "POST", "/v1/completions", msgspec.json.encode(asked), within_s)
            theirs = answer.choices[0].prompt_token_ids if answer.choices else None
        except TeacherRefusedError as error:
            _log.warning("the teacher reads no text: its tokenizer is not compared", url=self.url, why=str(error))
            return
        if theirs is None:
            _log.warning("the teacher tells no prompt_token_ids: its tokenizer is not compared", url=self.url)
        # Tokens that it puts before a text are its own.
        elif ours and theirs[-len(ours) :] != ours:
            raise UsageError(
                f"the teacher at {self.url} reads {text[:40]!r} as {theirs[:8]}…, the policy's tokenizer as {ours[:8]}…",
                "take a teacher with the policy's tokenizer: logprobs of other tokens teach nothing",
            )

    async def _asked(self, kind: type[_Answer], method: str, path: str, body: bytes | None, within_s: float) -> _Answer:
        asking = AsyncRetrying(
            retry=retry_if_exception_type(_LostError), wait=_back_off, stop=stop_after_delay(within_s), reraise=True
        )
        last = "no answer"

        async def once() -> bytes:
            nonlocal last
            try:
                return await self._once(method, path, body)
            except _LostError as error:
                last = str(error)
                raise

        try:
            async with asyncio.timeout(within_s):
                content: bytes = await asking(once)
        except (_LostError, TimeoutError) as error:
            raise TeacherError(
                f"the teacher at {self.url} did not answer within {within_s:g} s ({last})",
                "see that it runs, then start the trainer again",
            ) from error
        try:
            return msgspec.json.decode(content, type=kind)
        except UNDECODABLE as error:
            raise WireError(f"{self.url}{path} answered {content[:200]!r} ({error})") from error

    async def _once(self, method: str, path: str, body: bytes | None) -> bytes:
        url = f"{self.url}{path}"
        try:
            async with self._opened().request(method, url, data=body, allow_redirects=False) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            if (refused := self._trust.refusal(self.url, error)) is not None:
                raise refused from error
            raise _LostError(f"{url} cannot be reached ({str(error) or repr(error)})") from error
        status = response.status
        if status < HTTPStatus.BAD_REQUEST:
            return content
        what = f"{url} answered {status} ({content[:500].decode(errors='replace')})"
        if status in _AGAIN or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _LostError(what)
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise UsageError(what, "give its key: trainer.teacher.key_file")
        raise TeacherRefusedError(what)

    def _opened(self) -> aiohttp.ClientSession:
        if self._http is None:
            # Made here: it belongs to the loop that it is made on.
            connector = kept_connections(self._trust.verify, _KEEP_ALIVE_S)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self._http
