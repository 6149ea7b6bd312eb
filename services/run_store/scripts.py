"""Lua functions that the scripts on a run's keys are composed of: what several of them do is written here once.

Keys come by argument: the script that calls a function declares them. For Redis 7 and later, and Valkey.
"""

from __future__ import annotations

# Commands with as many words as it takes: `unpack` holds no more than 8,000. `fetched` maps each field to its value, or
# to false.
BATCHES = """
local function batched(command, key, words)
  for at = 1, #words, 4000 do redis.call(command, key, unpack(words, at, math.min(at + 3999, #words))) end
end
local function fetched(key, fields)
  local found = {}
  for at = 1, #fields, 4000 do
    local values = redis.call('HMGET', key, unpack(fields, at, math.min(at + 3999, #fields)))
    for i, value in ipairs(values) do found[fields[at + i - 1]] = value end
  end
  return found
end
"""

# Whether a group is counted as dropped now: not where it was before. KEYS of the set, and of the generation before.
COUNTS = """
local function counts(set, earlier, group, most)
  if redis.call('SISMEMBER', earlier, group) == 1 or redis.call('SADD', set, group) == 0 then return 0 end
  if redis.call('SCARD', set) >= tonumber(most) then redis.call('RENAME', set, earlier) end
  return 1
end
"""

# Takes groups off the open account; answers when each of those that were on it was opened. A group of which something is
# in the stream is the trainer's to drop, or both would count it. Needs BATCHES and COUNTS.
CLOSE = """
local function close(accounts, open, published, set, earlier, most, groups, drop)
  local records, closed, opened_at, dropped = fetched(open, groups), {}, {}, 0
  for _, group in ipairs(groups) do
    if records[group] then
      closed[#closed + 1] = group
      opened_at[#closed] = tostring(cjson.decode(records[group])[3])
      records[group] = false
    end
  end
  if #closed == 0 then return opened_at end
  batched('HDEL', open, closed)
  redis.call('HINCRBY', accounts, 'closed_groups', #closed)
  if not drop then batched('HDEL', published, closed)
  else
    for _, group in ipairs(closed) do
      if redis.call('HDEL', published, group) == 0 then dropped = dropped + counts(set, earlier, group, most) end
    end
  end
  if dropped > 0 then redis.call('HINCRBY', accounts, 'dropped_groups', dropped) end
  return opened_at
end
"""

# Writes the end of a group in its journal, the key at `from`, once: `owner` is nobody afterwards. That key and those up to
# `to` are kept for so many seconds.
CONCLUDE = """
local function conclude(owners, owner, group, record, from, to, seconds)
  if owner then
    redis.call('RPUSH', KEYS[from], record)
    redis.call('HDEL', owners, group)
  end
  for i = from, to do redis.call('EXPIRE', KEYS[i], seconds) end
end
"""
