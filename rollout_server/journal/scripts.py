"""Lua scripts of the journal (`rollout_server.journal.journal`): each asks first who the owner of the group is."""

from __future__ import annotations

from services.run_store.scripts import BATCHES, CONCLUDE

# KEYS: owners; for each record journal, partial answer, what is kept beside, undelivered calls; for each addition to a
# partial answer its key. ARGV: owner, how long a partial answer is kept, how many records; for each record group, position,
# payload, the value that is kept, for how long ('' for no end), the call that is answered; for each addition group, how
# many parts, and these. Answers 1 for each that is in the journal now, records first. Parts are written before records:
# nobody waits for a part whose client went away, and it must not be kept on behind the record that removes its answer. A
# partial answer's time begins anew with one in 32 of its parts: there is an addition for every chunk of a stream, so each
# command counts.
WRITE = (
    BATCHES
    + """
local records = tonumber(ARGV[3])
local first_addition = 4 + 6 * records
local groups = {}
for at = 4, first_addition - 1, 6 do groups[#groups + 1] = ARGV[at] end
local at = first_addition
while at <= #ARGV do
  groups[#groups + 1] = ARGV[at]
  at = at + 2 + ARGV[at+1]
end
local owners, done = fetched(KEYS[1], groups), {}
at = first_addition
for i = 4 * records + 2, #KEYS do
  local ok, parts = owners[ARGV[at]] == ARGV[1], tonumber(ARGV[at+1])
  if ok then
    local length
    for part = at + 2, at + 1 + parts do length = redis.call('RPUSH', KEYS[i], ARGV[part]) end
    if (length - 1) % 32 < parts then redis.call('EXPIRE', KEYS[i], ARGV[2]) end
  end
  done[i - 3 * records - 1] = ok and 1 or 0
  at = at + 2 + parts
end
at = 4
for record = 1, records do
  local i, group, position, payload, kept = 4 * record - 2, ARGV[at], tonumber(ARGV[at+1]), ARGV[at+2], ARGV[at+3]
  local seconds, call = ARGV[at+4], ARGV[at+5]
  at = at + 6
  local ok = owners[group] == ARGV[1]
  if ok then
    local length = redis.call('LLEN', KEYS[i])
    if length == position then
      redis.call('RPUSH', KEYS[i], payload)
      if KEYS[i+1] ~= KEYS[i+2] then redis.call('UNLINK', KEYS[i+1]) end
      if seconds ~= '' then redis.call('SET', KEYS[i+2], kept, 'EX', seconds)
      elseif kept ~= '' then redis.call('SET', KEYS[i+2], kept) end
      if call ~= '' then redis.call('SREM', KEYS[i+3], call) end
    else
      ok = redis.call('LINDEX', KEYS[i], position) == payload
    end
  end
  done[record] = ok and 1 or 0
end
return done
"""
)

# KEYS: owners; for each group its journal, then keys of its sessions. ARGV: owner; for each group its id, how many keys of
# sessions, how many payloads, and these. Takes hold of new groups; answers 1 for each that is its owner's now.
OPEN = (
    BATCHES
    + """
local answers, key, at = {}, 2, 2
while at <= #ARGV do
  local group, names, count, journal = ARGV[at], tonumber(ARGV[at+1]), tonumber(ARGV[at+2]), KEYS[key]
  local ok = true
  if redis.call('EXISTS', journal) == 1 then
    ok = redis.call('HGET', KEYS[1], group) == ARGV[1] and redis.call('LINDEX', journal, 0) == ARGV[at+3]
  else
    local payloads = {}
    for i = 1, count do payloads[i] = ARGV[at+2+i] end
    redis.call('HSET', KEYS[1], group, ARGV[1])
    batched('RPUSH', journal, payloads)
    for i = key + 1, key + names do redis.call('SET', KEYS[i], group) end
  end
  answers[#answers+1] = ok and 1 or 0
  key, at = key + 1 + names, at + 3 + count
end
return answers
"""
)

# KEYS: owners, journal. ARGV: group. Answers its owner; where it has none, the journal.
LOOK = """
return redis.call('HGET', KEYS[1], ARGV[1]) or redis.call('LRANGE', KEYS[2], 0, -1)
"""

# KEYS: owners, journal, open groups. ARGV: group, expected owner, new owner, its server id.
CLAIM = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return false end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
local known = redis.call('HGET', KEYS[3], ARGV[1])
if known then
  local record = cjson.decode(known)
  redis.call('HSET', KEYS[3], ARGV[1], cjson.encode({record[1], ARGV[4], record[3]}))
end
return redis.call('LRANGE', KEYS[2], 0, -1)
"""

# KEYS: owners, journal, undelivered calls, then those of sessions. ARGV: owner, group, payload, seconds.
END = (
    CONCLUDE
    + """
local owner = redis.call('HGET', KEYS[1], ARGV[2])
if owner and owner ~= ARGV[1] then return 0 end
conclude(KEYS[1], owner, ARGV[2], ARGV[3], 2, #KEYS, ARGV[4])
return 1
"""
)

# KEYS: owners. ARGV: owner, groups.
RELEASE = """
for i = 2, #ARGV do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[1] then redis.call('HSET', KEYS[1], ARGV[i], '') end
end
return 1
"""
