"""Groups are finished in one step on a real Valkey: trajectories, ledger and journal, all of it or nothing, and once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from rollout_server.journal.journal import Journal
from rollout_server.journal.records import (
    GroupBegan,
    GroupEnded,
    SessionBegan,
    encode_finished,
    encode_record,
)
from services.run_store.client import connect
from services.run_store.keys import RunKeys
from services.run_store.ledger import Accounts, Ledger
from services.run_store.publishing import GroupTrajectories, JournalEnd, Published, TrajectoryWriter
from services.run_store.session_groups import SessionGroups, named_group, sibling_id
from services.run_store.undelivered import UndeliveredCalls, UndeliveredError
from services.supervisor.launch_plan import ValkeyPlan
from services.wire.errors import ConcludedError, DrainingError
from services.wire.trajectory import Trajectory, decode_trajectory
from tests.conftest import running_valkey
from tests.contract.rollout_server.test_rollout_app_redis import trajectory
from tests.support.rollout_host import hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine

DROPPED = GroupEnded(stream_ids=None, cause="run_concluded")
LATE = f"{7:032d}"
"""The name of a call that a gateway gave up."""


class Server:
    """A rollout server's part in the end of groups, without HTTP and engine. Its groups have `size` sessions."""

    def __init__(self, redis: Redis, run_id: str, name: str = "s0", size: int = 2) -> None:
        self.redis, self.run_id, self.keys, self.size = redis, run_id, RunKeys(run_id), size
        self.ledger = Ledger(redis, run_id)
        self.journal = Journal(redis, run_id, f"{name}/1", name, lambda *_: None)
        self.writer = TrajectoryWriter(redis, run_id, self.journal.owner)

    def members(self, group_id: str) -> list[str]:
        return [sibling_id(group_id, member) for member in range(self.size)]

    async def open(self, *group_ids: str) -> None:
        for group_id in group_ids:
            rules: dict[str, Any] = {"engine_version": 0, "base_version": 0, "k": 0, "batch": 64}
            ordinal = await self.ledger.open_group(group_id, "s0", **rules)
            began = GroupBegan(
                group_id=group_id,
                ordinal=ordinal,
                size=self.size,
                task="sums",
                purpose="train",
                idle_timeout_s=60.0,
                sampling=None,
                opened_at=0.0,
            )
            sessions = [session(name, at) for at, name in enumerate(self.members(group_id))]
            serving = asyncio.create_task(self.journal.run())
            await self.journal.open(began, sessions, lambda: None)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    def finished(self, group_id: str, without: Collection[str] = ()) -> GroupTrajectories:
        trajectories = [self.trajectory(group_id, member) for member in range(self.size)]
        end = JournalEnd(encode_finished(self.members(group_id)), encode_record(DROPPED))
        return GroupTrajectories(group_id, trajectories, without, closes=True, end=end)

    def trajectory(self, group_id: str, member: int) -> Trajectory:
        return trajectory(self.run_id, group_id, member)

    async def finish(self, *group_ids: str) -> Published:
        return await self.writer.publish_groups([self.finished(group_id) for group_id in group_ids])

    async def counted(self) -> tuple[int, int, int, int]:
        """Trajectories published, groups opened, closed, dropped."""
        found: Accounts = await self.ledger.accounts()
        return found.published, found.opened_groups, found.closed_groups, found.dropped_groups

    async def in_stream(self) -> list[str]:
        entries = await self.redis.xrange(self.keys.stream)
        return [decode_trajectory(fields[b"t"]).trajectory_id for _, fields in entries]

    async def ends(self, group_id: str) -> list[GroupEnded]:
        """What the journal says of the group's end: as often as it says so."""
        return [record for record in await self.journal.read(group_id) if isinstance(record, GroupEnded)]


def session(name: str, member: int) -> SessionBegan:
    return SessionBegan(
        session_id=name,
        member=member,
        fingerprint=b"",
        opened_at=0.0,
        task="sums",
        purpose="train",
        limits=b"{}",
        idle_timeout_s=60.0,
    )


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def server(redis: Redis, run_id: str) -> Server:
    return Server(redis, run_id)


async def test_all_that_redis_holds_of_a_finished_group_says_so(server: Server) -> None:
    await server.open("g")
    published = await server.finish("g")
    (ids,) = published.outcomes
    assert isinstance(ids, list) and len(set(ids)) == 2
    assert len(published.finished) == 1 and published.dropped == []
    assert await server.in_stream() == server.members("g")
    assert await server.counted() == (2, 1, 1, 0)
    assert await server.ends("g") == [
        GroupEnded(stream_ids=dict(zip(server.members("g"), ids, strict=True)), cause=None)
    ]
    written = await server.redis.lindex(server.keys.journal("g"), -1)  # type: ignore[misc]
    assert written == encode_record((await server.ends("g"))[0]), "byte for byte as the record is written elsewhere"
    assert 0 < await server.redis.ttl(server.keys.journal("g")) <= 600
    assert await server.journal.owner_of("g") is None
    for gone in (server.keys.open_groups, server.keys.published_groups, server.keys.owners):
        assert not await server.redis.exists(gone)


class LosesAnswers:
    """A script whose first answers are lost after it has run."""

    def __init__(self, script: Any, times: int) -> None:
        self._script, self._times = script, times

    async def __call__(self, **arguments: Any) -> Any:
        answer = await self._script(**arguments)
        if self._times:
            self._times -= 1
            raise RedisConnectionError("lost")
        return answer


@pytest.mark.parametrize("concluded", [False, True])
async def test_a_call_whose_answer_was_lost_does_no_harm_when_it_is_made_again(server: Server, concluded: bool) -> None:
    await server.open("a", "b")
    if concluded:
        await server.ledger.conclude(0)
    script = server.writer._publish
    server.writer._publish = LosesAnswers(script, 1)  # type: ignore[assignment]
    with pytest.raises(RedisConnectionError):
        await server.finish("a", "b")
    before = await server.counted(), await server.in_stream(), await server.ends("a")
    again = await server.finish("a", "b")
    assert (await server.counted(), await server.in_stream(), await server.ends("a")) == before
    assert (again.finished, again.dropped) == ([], []), "closed once"
    if concluded:
        assert [type(outcome) for outcome in again.outcomes] == [ConcludedError] * 2
        assert (await server.counted(), await server.ends("a")) == ((0, 2, 2, 2), [DROPPED])
    else:
        assert again.outcomes == (await server.finish("a", "b")).outcomes
        assert [sorted(end.stream_ids or {}) for end in await server.ends("a")] == [server.members("a")]
        assert await server.counted() == (4, 2, 2, 0)


@pytest.mark.parametrize("published_before", [False, True])
async def test_a_server_that_has_lost_the_group_writes_nothing_of_its_end(
    server: Server, published_before: bool
) -> None:
    """Also one whose trajectories are in the stream already: the group, and its end, are another server's."""
    await server.open("g")
    if published_before:
        await server.writer.publish([server.trajectory("g", member) for member in range(2)])
    other = Server(server.redis, server.run_id, "s1")
    assert await other.journal.claim("g", server.journal.owner) is not None
    before = await server.counted(), await server.in_stream()
    (outcome,) = (await server.finish("g")).outcomes
    assert isinstance(outcome, DrainingError)
    assert "group g was taken over" in str(outcome)
    assert (await server.counted(), await server.in_stream()) == before
    assert (await server.ends("g"), await server.journal.owner_of("g")) == ([], "s1/1")
    (taken,) = (await other.finish("g")).outcomes
    assert isinstance(taken, list)
    assert await other.counted() == (2, 1, 1, 0)
    # Who lost it, and did not notice, is told that it is finished: the ids are the first ones.
    assert (await server.finish("g")).outcomes == [taken]


async def test_a_group_that_was_released_is_nobodys_to_finish(server: Server) -> None:
    await server.open("g")
    await server.journal.release(["g"])
    (outcome,) = (await server.finish("g")).outcomes
    assert isinstance(outcome, DrainingError)
    assert (await server.counted(), await server.in_stream()) == ((0, 1, 0, 0), [])


async def test_a_concluded_run_takes_no_trajectories_and_its_groups_are_dropped_whole(server: Server) -> None:
    await server.open("early", "late")
    ((first),) = (await server.finish("early")).outcomes
    await server.ledger.conclude(3)
    published = await server.finish("early", "late")
    assert published.outcomes[0] == first
    assert isinstance(published.outcomes[1], ConcludedError)
    assert (len(published.finished), len(published.dropped)) == (0, 1)
    assert await server.counted() == (2, 2, 2, 1)
    assert await server.ends("late") == [DROPPED]
    assert await server.journal.owner_of("late") is None
    assert 0 < await server.redis.ttl(server.keys.journal("late")) <= 600
    # What is not its group's end leaves the group open: `finish_session` ends that.
    await server.redis.hset(server.keys.owners, "open", server.journal.owner)  # type: ignore[misc]
    alone = GroupTrajectories("open", [server.trajectory("open", 0)])
    (refused,) = (await server.writer.publish_groups([alone])).outcomes
    assert isinstance(refused, ConcludedError)
    assert await server.journal.owner_of("open") == server.journal.owner


async def test_of_a_batch_each_group_has_its_own_outcome(server: Server) -> None:
    """Nothing is written of those that are refused, and all of the others, wherever in the batch they stand."""
    await server.open("taken", "first", "noted", "known", "last")
    await Server(server.redis, server.run_id, "s1").journal.claim("taken", server.journal.owner)
    await UndeliveredCalls(server.redis, server.run_id).note(LATE, session_id=None, group_id="noted")
    (known,) = (await server.finish("known")).outcomes
    published = await server.finish("taken", "first", "noted", "known", "last", "last")
    taken, first, noted, again, last, twice = published.outcomes
    assert isinstance(taken, DrainingError)
    assert isinstance(noted, UndeliveredError)
    assert again == known
    assert isinstance(first, list) and isinstance(last, list) and twice == last
    expected = [name for group in ("known", "first", "last") for name in server.members(group)]
    assert await server.in_stream() == expected
    assert await server.counted() == (6, 5, 3, 0)
    assert set(await server.ledger.open_groups()) == {"taken", "noted"}
    assert [len(await server.ends(name)) for name in ("taken", "first", "noted", "known", "last")] == [0, 1, 0, 1, 1]
    assert await server.ledger.stream_id_of(sibling_id("first", 0)) == first[0]
    assert (await server.ledger.lengths()).count == 6


async def test_calls_that_were_given_up_must_be_reckoned_with(server: Server) -> None:
    await server.open("g")
    undelivered = UndeliveredCalls(server.redis, server.run_id)
    for call in (LATE, "a" * 32):
        await undelivered.note(call, session_id=sibling_id("g", 1), group_id=None)
    (noted,) = (await server.finish("g")).outcomes
    assert isinstance(noted, UndeliveredError)
    assert (noted.group_id, noted.calls) == ("g", {LATE, "a" * 32})
    assert (await server.counted(), await server.ends("g")) == ((0, 1, 0, 0), [])
    (ids,) = (await server.writer.publish_groups([server.finished("g", {LATE, "a" * 32})])).outcomes
    assert isinstance(ids, list)
    # A note that comes now is too late, and a repetition that knows nothing of it gets the ids.
    await undelivered.note("b" * 32, session_id=None, group_id="g")
    assert (await server.finish("g")).outcomes == [ids]


async def test_what_a_session_published_by_itself_counts_for_its_group_until_that_is_closed(server: Server) -> None:
    await server.open("g", "h")
    for group_id in "gh":
        alone = GroupTrajectories(group_id, [server.trajectory(group_id, 0)])
        await server.writer.publish_groups([alone, alone])
    assert await server.redis.hgetall(server.keys.published_groups) == {b"g": b"1", b"h": b"1"}  # type: ignore[misc]
    await server.finish("g")
    assert await server.ledger.close_group("h", dropped=True)
    assert await server.counted() == (3, 2, 2, 0), "what is in the stream is the trainer's to drop"
    assert await server.redis.hlen(server.keys.published_groups) == 0  # type: ignore[misc]


async def test_a_group_of_the_largest_size_fits_into_a_script(redis: Redis, run_id: str) -> None:
    server = Server(redis, run_id, size=1024)
    await server.open("a", "b", "c", "d", "e")
    published = await server.finish("a", "b", "c", "d", "e")
    assert [len(outcome) for outcome in published.outcomes if isinstance(outcome, list)] == [1024] * 5
    assert await server.counted() == (5 * 1024, 5, 5, 0)
    assert (await server.finish("a", "b", "c", "d", "e")).outcomes == published.outcomes
    (end,) = await server.ends("e")
    assert list(end.stream_ids or {}) == server.members("e")


def test_the_end_of_a_group_is_cut_where_its_ids_go() -> None:
    names = [sibling_id("g", member) for member in range(20)]
    pieces = encode_finished(names)
    ids = [f"1780000000000-{number}" for number in range(20)]
    packed = [bytes([0xA0 + len(each)]) + each.encode() for each in ids]
    whole = pieces[0] + b"".join(each + piece for each, piece in zip(packed, pieces[1:], strict=True))
    assert whole == encode_record(GroupEnded(stream_ids=dict(zip(names, ids, strict=True)), cause=None))


async def test_which_group_a_session_is_of_is_said_by_its_id_or_written_down(server: Server) -> None:
    """An id that a client chose may look like a sibling's of another group: what is written down goes before."""
    groups, keys, redis = SessionGroups(server.redis, server.run_id), server.keys, server.redis
    assert (named_group(sibling_id("g-1.2", 10)), named_group("g.s"), named_group(".1"), named_group("s")) == (
        "g-1.2",
        None,
        None,
        None,
    )
    await server.open("g", "other")
    assert not [name async for name in redis.scan_iter(keys.group_of("*"))], "siblings cost no key"
    assert [await groups.group_of(name) for name in ("g.0", "g.1", "h.0", "s-1")] == ["g", "g", None, None]
    serving = asyncio.create_task(server.journal.run())
    for member, name in enumerate(("s-1", "g.7", "h.0", "other.9"), 2):
        await server.journal.join("g", session(name, member), lambda: None)
    serving.cancel()
    assert [await groups.group_of(name) for name in ("s-1", "g.7", "h.0", "other.9")] == ["g"] * 4
    written = {name async for name in redis.scan_iter(keys.group_of("*"))}
    assert written == {keys.group_of(name).encode() for name in ("s-1", "h.0", "other.9")}
    await server.journal.conclude("g", GroupEnded(stream_ids=None, cause="idle"), ["g.0", "g.1", "s-1", "g.7", "h.0"])
    for name in (keys.group_of("s-1"), keys.group_of("h.0"), keys.journal("g")):
        assert 0 < await redis.ttl(name) <= 600
    await redis.delete(keys.journal("g"))
    assert await groups.group_of("g.0") is None


async def test_who_joined_with_an_id_of_its_own_is_forgotten_with_its_finished_group(server: Server) -> None:
    await server.open("g")
    await server.redis.set(server.keys.group_of("own"), "g")
    one = server.trajectory("g", 0)
    own = type(one)(**{name: getattr(one, name) for name in one.__struct_fields__} | {"trajectory_id": "own"})
    end = JournalEnd(encode_finished(["own"]), encode_record(DROPPED))
    await server.writer.publish_groups([GroupTrajectories("g", [own], closes=True, end=end)])
    assert 0 < await server.redis.ttl(server.keys.group_of("own")) <= 600


@pytest.fixture
def lonely_valkey(tmp_path: Path) -> Iterator[ValkeyPlan]:
    """A Valkey in which nobody else makes commands."""
    with running_valkey(tmp_path) as plan:
        yield plan


async def calls_of(redis: Redis) -> dict[str, int]:
    """How often each command was made, in scripts too."""
    stats = await redis.info("commandstats")
    return {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in stats.items() if name != "cmdstat_info"}


async def test_a_batch_of_groups_costs_one_call_and_few_commands(lonely_valkey: ValkeyPlan, run_id: str) -> None:
    """Beside an append for each trajectory, what is written grows with the groups, not with their sessions."""
    redis = connect(lonely_valkey.url)
    try:
        server = Server(redis, run_id, size=8)
        names = [f"g-{number:032d}" for number in range(17)]
        await server.open(names[0])
        await server.finish(names[0])  # the scripts are loaded
        before = await calls_of(redis)
        await server.open(*names[1:])
        opened = await calls_of(redis)
        await server.finish(*names[1:])
        finished = await calls_of(redis)
    finally:
        await redis.aclose()
    opening = {name: count - before.get(name, 0) for name, count in opened.items() if count > before.get(name, 0)}
    ending = {name: count - opened.get(name, 0) for name, count in finished.items() if count > opened.get(name, 0)}
    assert opening.pop("evalsha") == 2 * 16, "admission and journal, a group alone"
    assert sum(opening.values()) <= 16 * 16, opening
    assert ending.pop("evalsha") == 1
    assert ending.pop("xadd") == 16 * 8
    assert sum(ending.values()) <= 16 * 6 + 16, ending


async def test_a_server_finishes_a_group_with_one_call_at_most(
    lonely_valkey: ValkeyPlan, run_id: str, chat_policy: Path
) -> None:
    """Those that come while one is on its way share the next. What the server asks in the background is allowed for."""
    engine, settings = ScriptedEngine(answer_length=4, max_model_len=256), small_batch(batch=16)
    async with hosting(
        engine, redis_url=lonely_valkey.url, run_id=run_id, model=chat_policy, settings=settings
    ) as host:
        groups = await asyncio.gather(*(host.open(group_size=4) for _ in range(16)))
        for group in groups:
            assert (await host.turns(group, *["1="] * 4)).status_code == 200
        before = await calls_of(host.redis)
        answers = await asyncio.gather(*(host.finish(group, 0.0, 1.0, 0.0, 1.0) for group in groups))
        after = await calls_of(host.redis)
        assert [answer.status_code for answer in answers] == [200] * 16
        assert after["xadd"] - before.get("xadd", 0) == 16 * 4
        assert after["evalsha"] - before["evalsha"] <= 16 + 4
        accounts = await host.ledger.accounts()
        assert (accounts.published, accounts.closed_groups, accounts.dropped_groups) == (64, 16, 0)
        assert not await host.redis.exists(RunKeys(run_id).owners)
