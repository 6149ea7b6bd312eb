"""Trajectories into the stream, and the end of their groups: all that Redis holds of it changes in one script.

    group ──owner? run open? nothing given up?──► XADD each (once a trajectory id) ──ends?──► ledger closed, journal ended
              └── no: nothing of this group is written, and it is told why; of the others all is

Several groups go in one call, each all or none. A call that is made again, because its answer was lost, finds the ids that
the first gave, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType

import msgspec
import structlog
from redis.asyncio import Redis

from services.policies.length_stats import bucket_of
from services.run_store.blobs import BlobStore
from services.run_store.client import as_text
from services.run_store.keys import RunKeys
from services.run_store.ledger import KEPT_DROPPED
from services.run_store.scripts import BATCHES, CLOSE, CONCLUDE, COUNTS
from services.run_store.session_groups import keys_of_sessions
from services.run_store.undelivered import UndeliveredError
from services.wire.choices import detach, reference
from services.wire.errors import ConcludedError, DrainingError, RollmeshError
from services.wire.trajectory import Trajectory, encode_trajectory

KEPT_IDS, KEPT_IDS_S = 65_536, 600
"""A generation of trajectory ids ends when it holds so many and has lasted so long; two are kept."""
BLOB_BYTES = 64 << 20
"""The largest blob of a trajectory."""
KEEP_ENDED_S = 600
"""How long the journal of a group that has ended is kept, for calls that come late."""

_log = structlog.get_logger()

# KEYS 12 …: of each group its journal, its undelivered calls, and who of its sessions has a key (`session_groups`). ARGV:
# owner ('' for anybody), ids of a generation, how long it lasts at least (s), KEPT_DROPPED, KEEP_ENDED_S; then of each
# group: its name, keys, trajectories, the undelivered calls that they are without, '1' where it ends, '1' where its
# journal does; the journal's record for a concluded run, and pieces of that for another, between which the stream ids go;
# then of each trajectory id, bucket of its length, length, payload, its blob's name and reference ('' where it has none).
# KEYS 11 before those: blobs by stream id. ARGV 6: the beginning of their keys.
# Of a group that is not open (any more) no count is kept: nobody would take it away.
_PUBLISH = (
    BATCHES
    + COUNTS
    + CLOSE
    + CONCLUDE
    + """
local me, at, key = ARGV[1], 6, 11
local function take() at = at + 1 return ARGV[at] end
local groups, names, asked = {}, {}, {}
while at < #ARGV do
  local group = {name = take(), from = key + 1}
  group.to = key + tonumber(take())
  local count = tonumber(take())
  group.without = take()
  group.closes = take() == '1'
  group.ends = take() == '1'
  if group.ends then
    group.dropped = take()
    group.record = at
    at = at + count + 1
  end
  group.first, group.last = at + 1, at + 6 * count
  for i = group.first, group.last, 6 do asked[#asked + 1] = ARGV[i] end
  at, key = group.last, group.to
  groups[#groups + 1], names[#names + 1] = group, group.name
end

local ids, earlier = fetched(KEYS[2], asked), {}
for _, id in ipairs(asked) do if not ids[id] then earlier[#earlier + 1] = id end end
if #earlier > 0 then for id, stream_id in pairs(fetched(KEYS[7], earlier)) do ids[id] = stream_id end end
local owners = fetched(KEYS[5], names)
local concluded = redis.call('HGET', KEYS[3], 'concluded') == '1'

local function refused(group, owner, fresh)
  if me ~= '' and owner and owner ~= me and (fresh or group.ends) then return {'TAKEN'} end
  if not fresh then return nil end
  -- Before it is asked whether the group has ended: this may be a repetition of the call that dropped it.
  if concluded then return {'CONCLUDED'} end
  if me ~= '' and not owner then return {'TAKEN'} end
  local undelivered = redis.call('SMEMBERS', KEYS[group.from + 1])
  table.sort(undelivered)
  if table.concat(undelivered, ',') ~= group.without then return {'UNDELIVERED', unpack(undelivered)} end
end

local outcomes, finished, dropped = {}, {}, {}
local written, lengths, total, fields = 0, {}, 0, {}
for n, group in ipairs(groups) do
  local owner, fresh, new = owners[group.name], false, 0
  for i = group.first, group.last, 6 do fresh = fresh or not ids[ARGV[i]] end
  local outcome = refused(group, owner, fresh)
  local record = group.dropped
  if not outcome then
    outcome = {'OK'}
    for i = group.first, group.last, 6 do
      local id = ids[ARGV[i]]
      if not id then
        if ARGV[i + 5] == '' then id = redis.call('XADD', KEYS[1], '*', 't', ARGV[i + 3])
        else id = redis.call('XADD', KEYS[1], '*', 't', ARGV[i + 3], 'b', ARGV[i + 5]) end
        if ARGV[i + 4] ~= '' then
          redis.call('PERSIST', ARGV[6] .. ARGV[i + 4])
          redis.call('HSET', KEYS[11], id, ARGV[i + 4])
        end
        ids[ARGV[i]] = id
        fields[#fields + 1], fields[#fields + 2] = ARGV[i], id
        lengths[ARGV[i + 1]] = (lengths[ARGV[i + 1]] or 0) + 1
        total, new = total + ARGV[i + 2], new + 1
      end
      outcome[#outcome + 1] = id
    end
    written = written + new
    if group.closes then finished[#finished + 1] = group.name
    elseif new > 0 and redis.call('HEXISTS', KEYS[8], group.name) == 1 then
      redis.call('HINCRBY', KEYS[4], group.name, new)
    end
    if group.ends then
      local pieces = {ARGV[group.record + 1]}
      for i = 2, #outcome do
        pieces[#pieces + 1], pieces[#pieces + 2] = cmsgpack.pack(outcome[i]), ARGV[group.record + i]
      end
      record = table.concat(pieces)
    end
  elseif outcome[1] == 'CONCLUDED' and group.closes then dropped[#dropped + 1] = group.name
  end
  if group.ends and (outcome[1] == 'OK' or outcome[1] == 'CONCLUDED') then
    conclude(KEYS[5], owner, group.name, record, group.from, group.to, ARGV[5])
    owners[group.name] = false
  end
  outcomes[n] = outcome
end

if written > 0 then
  batched('HSET', KEYS[2], fields)
  redis.call('HINCRBY', KEYS[3], 'published', written)
  for bucket, count in pairs(lengths) do redis.call('HINCRBY', KEYS[6], bucket, count) end
  redis.call('HINCRBY', KEYS[6], 'total', total)
  if redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[2]) then
    local now = tonumber(redis.call('TIME')[1])
    local since = tonumber(redis.call('HGET', KEYS[3], 'ids_since') or '0')
    if now - since >= tonumber(ARGV[3]) then
      redis.call('RENAME', KEYS[2], KEYS[7])
      redis.call('HSET', KEYS[3], 'ids_since', now)
    end
  end
end
local function closed(those, drop)
  return close(KEYS[3], KEYS[8], KEYS[4], KEYS[9], KEYS[10], ARGV[4], those, drop)
end
return {outcomes, closed(finished, false), closed(dropped, true)}
"""
)


@dataclass(frozen=True, slots=True)
class JournalEnd:
    """What the journal of a group says of its end (msgpack), to be written with its trajectories.

    `finished`: where all of them are in the stream, cut where their ids go, in their order; `dropped`: where the run has
    concluded.
    """

    finished: Sequence[bytes]
    dropped: bytes


@dataclass(frozen=True, slots=True)
class GroupTrajectories:
    """Trajectories of one group. `without`: its undelivered calls, whose answers they do not hold. `closes`: the group ends
    with them, in the ledger; `end`: and in its journal, all its sessions being among them."""

    group_id: str
    trajectories: Sequence[Trajectory]
    without: Collection[str] = ()
    closes: bool = False
    end: JournalEnd | None = None


@dataclass(frozen=True)
class Published:
    """`outcomes`: of each group the stream ids of its trajectories, or why none of them was appended.

    `finished`, `dropped`: when those groups were opened (Unix seconds) that were closed so.
    """

    outcomes: list[list[str] | RollmeshError]
    finished: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)


class TrajectoryWriter:
    """A rollout server's end of the stream. `owner`: its incarnation; it may only write of groups that it holds.

    `kept_ids`, `kept_ids_s`: KEPT_IDS and KEPT_IDS_S. `blob_bytes`: the largest blob; a trajectory with more is appended
    without it, and says so.
    """

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        owner: str = "",
        *,
        kept_ids: int = KEPT_IDS,
        kept_ids_s: float = KEPT_IDS_S,
        blob_bytes: int = BLOB_BYTES,
    ) -> None:
        self._names = keys = RunKeys(run_id)
        self._blobs, self._blob_bytes = BlobStore(redis, run_id), blob_bytes
        self._keys = [keys.stream, keys.stream_ids, keys.accounts, keys.published_groups, keys.owners, keys.lengths]
        self._keys += [keys.earlier_stream_ids, keys.open_groups, keys.dropped_groups, keys.earlier_dropped_groups]
        self._keys += [keys.blobs]
        self._settings = (owner, kept_ids, kept_ids_s, KEPT_DROPPED, KEEP_ENDED_S, keys.blob(""))
        self._publish = redis.register_script(_PUBLISH)

    async def publish(
        self, trajectories: Sequence[Trajectory], without: Mapping[str, Collection[str]] = MappingProxyType({})
    ) -> list[str]:
        """Append; returns their stream ids. A trajectory published before keeps its first id.

        `without`: trajectory id → the undelivered calls of its group, whose answers it does not hold. Raises as a group's
        outcome of `publish_groups` says; of several groups, some are then in the stream.
        """
        groups = [
            GroupTrajectories(group_id, (of_group := list(each)), without.get(of_group[0].trajectory_id, ()))
            for group_id, each in groupby(trajectories, lambda trajectory: trajectory.group_id)
        ]
        ids: list[str] = []
        for outcome in (await self.publish_groups(groups)).outcomes:
            if isinstance(outcome, RollmeshError):
                raise outcome
            ids += outcome
        return ids

    async def publish_groups(self, groups: Sequence[GroupTrajectories]) -> Published:
        """Append the trajectories of each group, all or none, and end those that end with them.

        Why a group was not appended: ConcludedError where the run has concluded (one that ends is dropped), DrainingError
        where it is another server's now, UndeliveredError where other calls of it are noted as undelivered.
        """
        keys, arguments = list(self._keys), list[str | bytes | int | float](self._settings)
        blobs: dict[str, bytes] = {}
        for group in groups:
            of_group = [self._names.journal(group.group_id), self._names.undelivered(group.group_id)]
            if group.end is not None:
                names = (trajectory.trajectory_id for trajectory in group.trajectories)
                of_group += keys_of_sessions(self._names, group.group_id, names)
            keys += of_group
            arguments += self._asked(group, len(of_group), blobs)
        if blobs:
            await self._blobs.write(blobs)
        outcomes, finished, dropped = await self._publish(keys=keys, args=arguments)
        return Published(
            [_outcome(group, *outcome) for group, outcome in zip(groups, outcomes, strict=True)],
            [float(opened_at) for opened_at in finished],
            [float(opened_at) for opened_at in dropped],
        )

    def _asked(self, group: GroupTrajectories, keys: int, blobs: dict[str, bytes]) -> list[str | bytes | int]:
        """Of one group, as the script reads it; `blobs` gets what is to be written before."""
        asked: list[str | bytes | int] = [
            group.group_id,
            keys,
            len(group.trajectories),
            ",".join(sorted(group.without)),
        ]
        asked += ["1" if group.closes else "", "1" if group.end is not None else ""]
        if group.end is not None:
            if len(group.end.finished) != len(group.trajectories) + 1:
                raise ValueError(f"the end of group {group.group_id} is cut in {len(group.end.finished)} pieces")
            asked += [group.end.dropped, *group.end.finished]
        for trajectory in group.trajectories:
            sampled = trajectory.sampled_tokens()
            bare, blob = detach(trajectory)
            asked += [trajectory.trajectory_id, bucket_of(sampled), sampled, encode_trajectory(bare)]
            if blob is None:
                asked += ["", ""]
                continue
            ref = reference(trajectory.trajectory_id, blob, self._blob_bytes)
            if ref.name:
                blobs[ref.name] = blob
            else:
                _log.warning(
                    "an engine's choices are not kept",
                    trajectory=trajectory.trajectory_id,
                    bytes=ref.size,
                    most=self._blob_bytes,
                    remedy="raise rollout.blob_mib, or cut more (top_k)",
                )
            asked += [ref.name, msgspec.msgpack.encode(ref)]
        return asked


def _outcome(group: GroupTrajectories, kind: bytes, *values: bytes) -> list[str] | RollmeshError:
    if kind == b"TAKEN":
        return DrainingError(f"group {group.group_id} was taken over by another server", "send the call again")
    if kind == b"CONCLUDED":
        return ConcludedError("the run has concluded", "no more trajectories are taken")
    texts = [as_text(value) for value in values]
    return UndeliveredError(group.group_id, frozenset(texts)) if kind == b"UNDELIVERED" else texts
