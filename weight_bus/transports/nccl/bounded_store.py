"""torch's key-value store with a deadline for every call: its own `add` and `check` wait for an answer for ever.

On a link that is cut the kernel gives a connection up after a quarter of an hour; a stage must not wait for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Call = tuple[Future[Any], Callable[[], Any]]


class BoundedStore:
    """Calls of `plain` on a thread of its own, one after the other. Each raises RuntimeError after `timeout_s`; then the
    store is of no use any more, and its thread ends when the connection does."""

    def __init__(self, plain: Any, timeout_s: float) -> None:
        self.plain, self._timeout_s = plain, timeout_s
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # Not an executor's: the interpreter would wait for it at its end.
        threading.Thread(target=_serve, args=(self._calls,), name="broadcast-store", daemon=True).start()

    def add(self, key: str, amount: int) -> int:
        return self._bounded(lambda: int(self.plain.add(key, amount)))

    def set(self, key: str, value: str) -> None:
        self._bounded(lambda: self.plain.set(key, value))

    def get(self, key: str) -> bytes:
        return self._bounded(lambda: bytes(self.plain.get(key)))

    def check(self, keys: list[str]) -> bool:
        return self._bounded(lambda: bool(self.plain.check(keys)))

    def _bounded(self, call: Callable[[], T]) -> T:
        answer: Future[T] = Future()
        self._calls.put((answer, call))
        try:
            return answer.result(self._timeout_s)
        except TimeoutError as error:
            raise RuntimeError(f"its store did not answer within {self._timeout_s:g} s: is the link cut?") from error

    def __del__(self) -> None:
        self._calls.put(None)


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (asked := calls.get()) is not None:
        answer, call = asked
        try:
            answer.set_result(call())
        except RuntimeError as error:
            answer.set_exception(error)
        del asked, answer, call
