"""One call of a reward function, in a child that is forked for it: whatever it does ends with it.

    worker ──fork──► child: confined, reads the sample, function, outcome ──► exits
      └─ reads outcome and output, both bounded; at too much time, output or memory, or the service's end: kills it

The child begins as the worker is right after the import: nothing that a call changes is seen by the next one.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from services.policies.rewards import RewardFailure
from services.rewards.sandbox.confinement import Confinement, describe_end
from services.rewards.sandbox.function import RewardFunction, describe
from services.rewards.sandbox.protocol import (
    MAX_REPLY_BYTES,
    Failed,
    Limits,
    Outcome,
    ProtocolError,
    call_decoder,
    outcome_decoder,
    read,
)
from services.rewards.sandbox.usage import LOOK_EVERY_S, Usage

OUTPUT_BYTES = 1 << 20
"""A call that writes more is killed."""
_TOLD_BYTES = 2000
_READ = 1 << 16
_OUTCOME_FD = 3


class ServiceGoneError(Exception):
    """The service has closed the worker's input."""


def run_call(function: RewardFunction, line: bytes, limits: Limits, confinement: Confinement) -> Outcome:
    """The outcome of one call, as it came from the service; the child is gone when this returns.

    Raises ServiceGoneError; OSError where the kernel gives no process or namespace any more.
    """
    outcome, outcome_in = os.pipe()
    output, output_in = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = confinement.fork()
    if child == 0:
        _run_in_child(function, line, confinement, outcome_in, output_in)
    os.close(outcome_in)
    os.close(output_in)
    try:
        return _Attending(child, outcome, output, confinement.usage_of(child)).until_it_ends(limits.time_s)
    finally:
        os.close(outcome)
        os.close(output)
        confinement.after_call()


def _run_in_child(
    function: RewardFunction, line: bytes, confinement: Confinement, outcome_in: int, output_in: int
) -> NoReturn:
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output_in, 1)
        os.dup2(output_in, 2)
        os.dup2(outcome_in, _OUTCOME_FD, inheritable=False)
        confinement.confine_call()
        # The worker's own line to the service, above all.
        os.closerange(_OUTCOME_FD + 1, os.sysconf("SC_OPEN_MAX"))
        confinement.filter_call()
        outcome = function.call(read(line, call_decoder).sample)
    except ProtocolError as error:
        outcome = Failed(RewardFailure.SAMPLE, error.what)
    except MemoryError:
        outcome = Failed(RewardFailure.MEMORY, "the sample does not fit into its memory")
    except BaseException as error:  # noqa: BLE001 - nothing may leave this process but by its end
        outcome = Failed(RewardFailure.CRASH, describe(error))
    try:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        encoded = msgspec.json.encode(outcome)
        while encoded:
            encoded = encoded[os.write(_OUTCOME_FD, encoded) :]
    finally:
        os._exit(0)


@dataclass
class _Attending:
    """The worker's side of one call."""

    child: int
    outcome: int
    output: int
    usage: Usage
    _said: deque[bytes] = field(default_factory=deque)
    _written: int = 0
    _answer: bytes = b""
    _killed_for: Failed | None = None

    def until_it_ends(self, time_s: float) -> Outcome:
        ends = time.monotonic() + time_s
        alive = os.pidfd_open(self.child)
        for descriptor in (self.outcome, self.output):
            os.set_blocking(descriptor, False)
        try:
            with selectors.DefaultSelector() as selector:
                for descriptor in (0, alive, self.outcome, self.output):
                    selector.register(descriptor, selectors.EVENT_READ)
                self._watch(selector, alive, ends, time_s)
        finally:
            os.close(alive)
            self._kill()
            _, status, used = os.wait4(self.child, 0)
        # What it wrote last is still in the pipes.
        while self._read_answer() or self._read_output():
            pass
        return self._judge(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime > time_s)

    def _watch(self, selector: selectors.BaseSelector, alive: int, ends: float, time_s: float) -> None:
        looks = time.monotonic() + LOOK_EVERY_S
        while self._killed_for is None:
            ready = {key.fd for key, _ in selector.select(max(0.0, min(looks, ends) - time.monotonic()))}
            if 0 in ready:
                raise ServiceGoneError
            if self.outcome in ready and not self._read_answer():
                selector.unregister(self.outcome)
            if self.output in ready and not self._read_output():
                selector.unregister(self.output)
            if alive in ready:
                return
            if self._killed_for is None and time.monotonic() >= looks:
                self._killed_for = self.usage.too_much(ends)
                looks = time.monotonic() + LOOK_EVERY_S
            if self._killed_for is None and time.monotonic() >= ends:
                self._killed_for = Failed(RewardFailure.TIMEOUT, f"it ran for longer than {time_s:g} s")

    def _read_answer(self) -> bool:
        piece = _read(self.outcome)
        self._answer += piece
        if len(self._answer) > MAX_REPLY_BYTES:
            self._killed_for = self._killed_for or Failed(RewardFailure.OUTPUT, "its outcome is too long")
            return False
        return bool(piece)

    def _read_output(self) -> bool:
        piece = _read(self.output)
        self._written += len(piece)
        self._said.append(piece)
        while len(self._said) > 1 and sum(map(len, self._said)) - len(self._said[0]) >= _TOLD_BYTES:
            self._said.popleft()
        if self._written > OUTPUT_BYTES:
            self._killed_for = self._killed_for or Failed(
                RewardFailure.OUTPUT, f"it wrote more than {OUTPUT_BYTES >> 10} KiB of output"
            )
            return False
        return bool(piece)

    def _kill(self) -> None:
        """End the child and its session; what lives in a process namespace ends with it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)

    def _judge(self, exit_code: int, processor_time_is_up: bool) -> Outcome:
        said = b"".join(self._said)[-_TOLD_BYTES:].decode(errors="replace").strip()
        failed = self._killed_for
        if failed is None:
            try:
                outcome = read(self._answer, outcome_decoder)
                if not isinstance(outcome, Failed):
                    return outcome
                failed = outcome
            except ProtocolError:
                if processor_time_is_up and exit_code == -signal.SIGKILL:
                    failed = Failed(RewardFailure.TIMEOUT, "it used up its processor time")
                else:
                    failed = Failed(RewardFailure.CRASH, describe_end(exit_code))
        return Failed(failed.cause, failed.what, said)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _READ)
    except BlockingIOError:
        return b""
