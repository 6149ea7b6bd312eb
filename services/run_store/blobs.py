"""The run's blob store: what belongs to a trajectory and is too large for its stream entry, as keys of the run in Redis.

    write ──(expires in WRITTEN_S)──► entry refers to it ──(expires no more)──► settled as dropped, or trimmed: gone
                └── the server dies in between: it expires

A blob is written before the script that appends its entry, which takes the expiry away in the same step. It ends with its
entry: when that is dropped, or, where it was trained, when it is trimmed, for until then a trainer may have to replay it.
Names hold a digest of the bytes, so that writing once more changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from redis.asyncio import Redis

from services.run_store.keys import RunKeys
from services.wire.choices import BlobRef

WRITTEN_S = 600
"""How long a blob is kept that no entry refers to."""
READ_BYTES = 32 << 20
"""Blobs are read in answers of so many bytes, but for one that is larger."""

# For scripts: the end of the blobs of some entries. KEYS are the caller's to declare; blobs are in the slot of their run.
# `prefix`: of the names of their keys.
END_BLOBS = """
local function end_blobs(blobs, prefix, ids)
  if redis.call('EXISTS', blobs) == 0 then return end
  for _, id in ipairs(ids) do
    local name = redis.call('HGET', blobs, id)
    if name then
      redis.call('UNLINK', prefix .. name)
      redis.call('HDEL', blobs, id)
    end
  end
end
"""


class BlobStore:
    def __init__(self, redis: Redis, run_id: str, *, written_s: int = WRITTEN_S) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._written_s = written_s

    async def write(self, blobs: Mapping[str, bytes]) -> None:
        """Keep these, by name, for WRITTEN_S seconds at least. One that an entry refers to already stays as it is."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for name, blob in blobs.items():
                key = self._keys.blob(name)
                pipe.set(key, blob, nx=True, ex=self._written_s)
                # No expiry counts as the longest.
                pipe.expire(key, self._written_s, gt=True)
            await pipe.execute()

    async def read(self, refs: Sequence[BlobRef]) -> list[bytes | None]:
        """The blobs referred to, in their order; None for one that is not there. Each call to Redis is bounded."""
        found: list[bytes | None] = []
        part: list[BlobRef] = []
        for ref in refs:
            if part and sum(each.size for each in part) + ref.size > READ_BYTES:
                found += await self._read(part)
                part = []
            part.append(ref)
        return found + (await self._read(part) if part else [])

    async def _read(self, refs: Sequence[BlobRef]) -> list[bytes | None]:
        found = await self._redis.mget([self._keys.blob(ref.name) for ref in refs])
        return cast("list[bytes | None]", found)
