"""A worker: one process that imports one reward function and forks a child for each call of it.

    python -P -m services.rewards.sandbox.worker     speaks `services.rewards.sandbox.protocol` on standard input and output

It is started by the service and ends with it, by the end of its input or by the kernel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import msgspec

from services.rewards.sandbox.child import ServiceGoneError, run_call
from services.rewards.sandbox.confinement import Confinement, not_sure, try_means
from services.rewards.sandbox.function import load_function
from services.rewards.sandbox.protocol import Ready, Refused, order_decoder, read
from services.wire.errors import UsageError

_READ = 1 << 20
_REMEDY = "run it on a Linux that has user namespaces or Landlock, or set rewards.not_confined=warn"


def main() -> int:
    # Whatever the function's module prints goes to standard error, which the service reads.
    replies = os.dup(1)
    os.dup2(2, 1)
    lines = _lines()
    order = read(next(lines), order_decoder)
    means = try_means(order.limits, order.files)
    missing = not_sure(order.limits, means)
    if missing and order.must_hold:
        _reply(replies, Refused(f"{order.function} cannot be confined here ({'; '.join(missing)})", _REMEDY))
        return UsageError.exit_code
    confinement = Confinement(order.limits, order.files, means)
    try:
        confinement.begin()
        function = load_function(order.function, order.files.folder)
        confinement.close_off()
    except UsageError as error:
        _reply(replies, Refused(error.what, error.remedy))
        return error.exit_code
    except OSError as error:
        _reply(replies, Refused(f"{order.function} cannot be confined ({error})", _REMEDY))
        return UsageError.exit_code
    _reply(replies, Ready(str(means), missing))
    for line in lines:
        try:
            outcome = run_call(function, line, order.limits, confinement)
        except ServiceGoneError:
            return 0
        _reply(replies, outcome)
    return 0


def _lines() -> Iterator[bytes]:
    """Lines of standard input. Nothing is read ahead: what comes during a call is the end."""
    held = b""
    while piece := os.read(0, _READ):
        held += piece
        while b"\n" in held:
            line, _, held = held.partition(b"\n")
            yield line


def _reply(replies: int, reply: msgspec.Struct) -> None:
    encoded = msgspec.json.encode(reply) + b"\n"
    while encoded:
        encoded = encoded[os.write(replies, encoded) :]


if __name__ == "__main__":
    sys.exit(main())
