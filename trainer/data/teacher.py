"""The teacher's logprobs of what the policy sampled, asked for as trajectories arrive.

    stream ──► sound trajectory ──begin──► a call a segment, `at_once` of them in flight ──► kept until it is settled
                                                                                               │
    training or packing thread ──of(batch)──► waits for those that are missing, asks for those never begun ◄┘

A batch that is repeated after a restart is asked for again: the teacher is fixed. What failed is asked for once more when
its batch is trained; then its failure is the run's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Future

import numpy as np

from services.config.training.teacher import TeacherSettings
from services.host.aio import first_failure
from services.policies.batching import Group, Member
from services.wire.packed import unpack_tokens
from services.wire.trajectory import Segment, Trajectory
from trainer.algorithms.advantages.batch import Float64Array
from trainer.algorithms.advantages.rewards import Batch
from trainer.data.teacher_client import TeacherClient, TeacherError, TeacherRefusedError
from trainer.io_loop import Background

_TOGETHER_S = 60.0
"""What the last of many calls may take beyond its own deadline."""


class Teacher:
    """`begin` and `forget` are for the background loop, all else for other threads."""

    def __init__(self, client: TeacherClient, settings: TeacherSettings, background: Background) -> None:
        self._client, self._settings, self._background = client, settings, background
        self._slots = asyncio.Semaphore(settings.at_once)
        self._asked: dict[str, asyncio.Task[Float64Array]] = {}
        """By stream entry."""

    def begin(self, members: Sequence[Member[Trajectory]]) -> None:
        """Ask for those that were not asked for yet."""
        for member in members:
            if member.entry not in self._asked:
                asking = asyncio.ensure_future(self._of_trajectory(member.payload))
                # Whoever trains on it hears of a failure; nobody may.
                asking.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._asked[member.entry] = asking

    def forget(self, entries: Collection[str]) -> None:
        """Entries that are settled: nobody asks for them any more."""
        for entry in entries:
            asking = self._asked.pop(entry, None)
            if asking is not None:
                asking.cancel()

    def ask(self, groups: Sequence[Group[Trajectory]]) -> Future[None]:
        """Done once all of these are there. Its result may raise TeacherError."""
        return self._background.begin(self._all([member for group in groups for member in group.members]))

    def settled(self, entries: Collection[str]) -> None:
        """`forget`, for another thread than the loop's."""
        self._background.soon(lambda: self.forget(entries))

    def missing(self, groups: Sequence[Group[Trajectory]]) -> int:
        """How many trajectories of these it has not told yet."""
        asked = [self._asked.get(member.entry) for group in groups for member in group.members]
        return sum(asking is None or not asking.done() for asking in asked)

    def of(self, batch: Batch) -> Float64Array:
        """`[N]`: the teacher's logprob of each sampled token of a batch. Waits for what is missing.

        Raises TeacherError where it does not answer in time, or does not take what it is asked.
        """
        calls = -(-len(batch.segments.lengths) // self._settings.at_once)
        within_s = self._settings.timeout_s * (1 + calls) + _TOGETHER_S
        self._background.result(self.ask(batch.groups), "the teacher's logprobs", within_s)
        told = [self._asked[entry].result() for entry in batch.entries]
        return np.concatenate([np.zeros(0), *told])

    async def close(self) -> None:
        self.forget([*self._asked])
        await self._client.close()

    async def _all(self, members: Sequence[Member[Trajectory]]) -> None:
        """Raises the first failure, and leaves the others to go on."""
        for member in members:
            asking = self._asked.get(member.entry)
            if asking is not None and asking.done() and (asking.cancelled() or asking.exception() is not None):
                del self._asked[member.entry]
        self.begin(members)
        asked = {self._asked[member.entry] for member in members}
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION) if asked else (set(), set())
        for asking in done:
            asking.result()

    async def _of_trajectory(self, trajectory: Trajectory) -> Float64Array:
        """float64 `[n]`: of its sampled tokens, in the order of its segments."""
        spoken = [segment for segment in trajectory.segments if segment.version_spans]
        with first_failure():
            async with asyncio.TaskGroup() as calls:
                told = [calls.create_task(self._of_segment(each, trajectory.trajectory_id)) for each in spoken]
        return np.concatenate([np.zeros(0), *(each.result() for each in told)])

    async def _of_segment(self, segment: Segment, trajectory: str) -> Float64Array:
        spans = segment.version_spans
        places = np.concatenate([np.arange(span.start, span.start + span.length) for span in spans])
        # What stands behind the last sampled token is nothing to it.
        prompt = unpack_tokens(segment.token_ids)[: int(places[-1]) + 1].tolist()
        async with self._slots:
            try:
                told = await self._client.logprobs(prompt, self._settings.timeout_s)
            except TeacherRefusedError as error:
                raise TeacherError(
                    f"the teacher refuses a segment of {len(prompt)} tokens of trajectory {trajectory} ({error.what})",
                    error.remedy or "see its log",
                ) from error
        sampled: Float64Array = told[places - 1]
        return sampled
