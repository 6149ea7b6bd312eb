"""Errors that say what happened, with which value, and how to mend it.

`RollmeshError` is what the command line turns into one line and an exit code, and what a service turns into a typed
HTTP answer. Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec's decoders raise for bytes from outside: other bytes than the schema's, text that is not UTF-8, and nesting
deeper than the interpreter's stack. Whoever decodes them makes typed errors of all of it."""


class RollmeshError(Exception):
    """Something went wrong at run time. The command line exits with 1; a service answers `status`.

    `what` says what happened and with which value; `remedy` what the reader can do about it.
    """

    exit_code = 1
    status = 500
    code = "internal"

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}: {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy
        self.finding: str | None = None
        """The section of the runbook that says more (`services.policies.diagnosis.finding`), where there is one."""

    @property
    def kind(self) -> str:
        """OpenAI's `type` of an error answer."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class UsageError(RollmeshError):
    """The user asked for something that cannot be (an unknown key, a port in use): exit code 2, HTTP 422."""

    exit_code = 2
    status = 422
    code = "usage"


class NoModelError(UsageError):
    """A folder does not hold a language model that can be loaded: whoever of a run finds it first says the same."""

    def __init__(self, folder: Path, error: Exception) -> None:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        super().__init__(f"{folder} holds no causal language model ({reason})", "give --model a Hugging Face folder")


class ContextLengthError(RollmeshError):
    """A prompt leaves no room for an answer: HTTP 400, in the words that OpenAI's clients look for."""

    status = 400
    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_model_len: int, *, at_least: bool = False) -> None:
        """`at_least`: the prompt was not tokenised, its length proves so many."""
        has = f"has {'at least ' if at_least else ''}{prompt_tokens}"
        super().__init__(
            f"this model's maximum context length is {max_model_len} tokens, and the prompt {has}",
            "shorten the prompt; at least one token must be left for the answer",
        )


class UnsupportedParameterError(RollmeshError):
    """A parameter that would change what is sampled and that no engine here supports: HTTP 400, never ignored."""

    status = 400
    code = "unsupported_parameter"


class BodyTooLargeError(RollmeshError):
    """A request's body is larger than the service takes: HTTP 413."""

    status = 413
    code = "request_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the body is larger than {limit_bytes >> 20} MiB", "send less, or raise the service's limit")


class UnauthenticatedError(RollmeshError):
    """No key, or one that nobody issued: HTTP 401."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(RollmeshError):
    """A valid key that does not open this door: HTTP 403."""

    status = 403
    code = "permission_denied"


class StallsServersError(RollmeshError):
    """Servers stood still or ended as soon as this call had come: it is sent to no other one, and should not come again."""

    status = 400
    code = "stalls_servers"

    def __init__(self, call: str, servers: str) -> None:
        super().__init__(
            f"rollout servers were lost as soon as they had {call} ({servers})",
            "do not send it again; make it smaller, and see those servers' logs",
        )


class SessionConcludedError(RollmeshError):
    """The session was finished or aborted: nothing can be added to it any more: HTTP 409."""

    status = 409
    code = "session_concluded"


class SessionExpiredError(RollmeshError):
    """The session's deadline or idle time ran out: HTTP 410."""

    status = 410
    code = "session_expired"


class UntrustedError(RollmeshError):
    """Who answers a call over TLS is not who was meant, or speaks no TLS: another try mends nothing. HTTP 502."""

    status = 502
    code = "untrusted"


class DeadlineError(RollmeshError):
    """A named wait ran out of time."""

    status = 504
    code = "deadline"


class NoBatchError(DeadlineError):
    """The trainer got no batch in time: the run has failed, and another start would wait as long (exit code 3)."""

    exit_code = 3
    code = "no_batch"


class NotFoundError(RollmeshError):
    """No such group, session, engine or update."""

    status = 404
    code = "not_found"


class ConflictError(RollmeshError):
    """The call contradicts what already happened (a finished group, a reused version)."""

    status = 409
    code = "conflict"


class ConcludedError(RollmeshError):
    """The run has concluded: no new groups, no more trajectories."""

    status = 410
    code = "concluded"


class CapacityError(RollmeshError):
    """Admission is closed; try again after `retry_after_s`."""

    status = 429
    code = "capacity"

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(what, f"try again in {retry_after_s:.2f} s")
        self.retry_after_s = retry_after_s


class NotReadyError(RollmeshError):
    """The service is starting, draining or has lost something it needs."""

    status = 503
    code = "not_ready"


class DrainingError(NotReadyError):
    """The server is on its way out and lets go of its sessions: another one takes them."""

    code = "draining"


class HeldElsewhereError(RollmeshError):
    """Another server, alive at `owner_url`, holds the session or group: HTTP 421, with that address in a header."""

    status = 421
    code = "held_elsewhere"

    def __init__(self, what: str, owner_url: str) -> None:
        super().__init__(what, f"send the call to {owner_url}, or to the gateway")
        self.owner_url = owner_url


class WireError(RollmeshError):
    """Bytes from another process are not what the schema says."""

    status = 400
    code = "wire"
