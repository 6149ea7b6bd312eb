"""Finished trajectories into the stream: in batches, each group's all or none, and its end in the same call."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import structlog
from redis.exceptions import RedisError

from services.run_store.ledger import Ledger
from services.run_store.publishing import GroupTrajectories, JournalEnd, TrajectoryWriter
from services.wire.errors import NotReadyError, RollmeshError
from services.wire.trajectory import Trajectory

_log = structlog.get_logger()

TOKENS_AT_ONCE = 1 << 20
"""A call carries no more tokens than this, unless one group alone does."""


@dataclass(slots=True, eq=False)
class _Finished:
    group: GroupTrajectories
    tokens: int
    stream_ids: asyncio.Future[list[str]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Publisher:
    """Appends finished trajectories to the stream in batches and closes their groups in the ledger.

        publish ──► queue ──► everything queued: one call, which appends, closes and concludes ──► stream ids

    What finishes while a call to Redis runs shares the next one. What is handed in together is appended all or none, and
    what ends with it ends in the same step. `run` is a task owned by the server.
    """

    def __init__(self, writer: TrajectoryWriter, ledger: Ledger) -> None:
        self._writer = writer
        self._ledger = ledger
        self._queue: list[_Finished] = []
        self._wake = asyncio.Event()

    async def publish(
        self,
        group_id: str,
        trajectories: Sequence[Trajectory],
        *,
        closes: bool = True,
        without: Collection[str] = (),
        end: JournalEnd | None = None,
    ) -> list[str]:
        """Stream ids of the trajectories, in their order; the same when repeated. `closes`: the group ends with them.

        `without`: undelivered calls, whose answers they do not hold. `end`: what the group's journal says of its end, if it
        ends with them too. Raises UndeliveredError when other calls are noted, ConcludedError (and a group that was to be
        closed is, as dropped), DrainingError when another server has the group, or NotReadyError when Redis fails: then try
        again.
        """
        tokens = sum(len(segment.loss_mask) for trajectory in trajectories for segment in trajectory.segments)
        finished = _Finished(GroupTrajectories(group_id, trajectories, without, closes, end), tokens)
        self._queue.append(finished)
        self._wake.set()
        return await finished.stream_ids

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        while True:
            await self._wake.wait()
            batch = self._take()
            try:
                await self._write(batch)
            except (RedisError, RollmeshError) as error:
                _log.warning("publishing failed", groups=len(batch), error=str(error))
                _fail(batch, _no_redis(error))
            except Exception:  # noqa: BLE001 - a bug: said with its traceback, and the failure of one group alone
                _log.exception("publishing failed", groups=len(batch))
                for finished in batch:
                    await self._write_alone(finished)

    async def _write_alone(self, finished: _Finished) -> None:
        try:
            await self._write([finished])
        except (RedisError, RollmeshError) as error:
            _fail([finished], _no_redis(error))
        except Exception as error:  # noqa: BLE001 - raised again in the waiting caller
            what = f"group {finished.group.group_id} cannot be published ({error!r})"
            _fail([finished], RollmeshError(what, "see the server's log, or abort its sessions"))

    def _take(self) -> list[_Finished]:
        batch, tokens = self._queue[:1], self._queue[0].tokens
        for finished in self._queue[1:]:
            tokens += finished.tokens
            if tokens > TOKENS_AT_ONCE:
                break
            batch.append(finished)
        del self._queue[: len(batch)]
        if not self._queue:
            self._wake.clear()
        return batch

    async def _write(self, batch: list[_Finished]) -> None:
        published = await self._writer.publish_groups([finished.group for finished in batch])
        self._ledger.were_closed(published.finished, dropped=False)
        self._ledger.were_closed(published.dropped, dropped=True)
        for finished, outcome in zip(batch, published.outcomes, strict=True):
            if isinstance(outcome, RollmeshError):
                _fail([finished], outcome)
            elif not finished.stream_ids.done():
                finished.stream_ids.set_result(outcome)


def _no_redis(error: Exception) -> NotReadyError:
    return NotReadyError(f"publishing needs Redis, which failed ({error})", "finish the group again")


def _fail(batch: list[_Finished], failure: RollmeshError) -> None:
    for finished in batch:
        if not finished.stream_ids.done():
            finished.stream_ids.set_exception(failure)
