-- Semaphores: the head of their script. The other files are its parts; the first argument of a call names one, and is
-- not among the ARGV that they describe. All take the same keys.
--
-- KEYS   1 P:counts    hash    c:NAME capacity; u:NAME permits held; r:NAME requests that hold some; fence: the last one;
--                              w:LENGTH:NAME:PROCESS place of a waiting process, and the µs until which it counts as alive
--        2 P:requests  hash    external id -> record
--        3 P:held      zset    external id by the µs from which its permits may be taken back; without a ttl by NEVER + the
--                              µs of its last renewal
--        4 P:released  zset    external id by the µs of its release
--        5 P:queue     zset    LENGTH:NAME:PLACE:PROCESS, all with score 0: the line of each semaphore, by place
--        6 P:history   stream  changes of capacities
-- P is {prefix}:permits:{{prefix}}: one slot of a cluster for each prefix, and the key of no mutex.
-- Channel P:turn:PROCESS: 'FREE@@NAME', when the process comes first in the line of a semaphore with so many free permits.
--
-- A record is a JSON array: token, fence, ttl in ms or 0, ms of the first grant, 1 if it is kept after its release, owner or
-- '', then names and counts. Token and fence are text: numbers in JSON have 14 digits here. (Arguments of redis.call have 17.)
--
-- Invariant: u:NAME is the sum over the records in `held`. An id is in `held` or in `released`, never in both. All
-- keys exist from the first semaphore on, by a member '' that is no request: a slot that is being moved answers for keys
-- that exist.
local call = redis.call
local PART = table.remove(ARGV, 1)
local COUNTS, REQUESTS, HELD, RELEASED, QUEUE, HISTORY = unpack(KEYS)
local TOKEN, FENCE, TTL, CREATED, KEPT, OWNER, PERMITS = 1, 2, 3, 4, 5, 6, 7
local NEVER = 4503599627370496
local PATIENCE = 500000 -- a waiting process that has not tried for so many µs loses its place
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

-- nil without a record, and with one that is not ours: it must not stop a sweep.
local function read(id)
  local text = call('HGET', REQUESTS, id)
  local fine, record = pcall(cjson.decode, text or '[]')
  return fine and type(record) == 'table' and record[OWNER] and record or nil
end

local function reclaim_at(ttl)
  return ttl > 0 and now + ttl * 1250 or NEVER + now
end

local function ms_left(record, score)
  return record[TTL] > 0 and math.max(math.floor((score - now) / 1000 - record[TTL] / 4), 0) or -1
end

-- { code, now, id, held, fence, owner, ttl, ms left or -1, ms since the first grant, { name, count, ... } }
local function reply(code, id, record, score)
  return { code, now, id, score and 1 or 0, record[FENCE], record[OWNER], record[TTL],
    score and ms_left(record, score) or -1, math.max(math.floor(now / 1000) - record[CREATED], 0),
    { unpack(record, PERMITS) } }
end

-- What this call read and changed of the counts, by name: { capacity, used, requests, changed, freed }.
local counts = {}

local function count(name, permits, requests)
  local seen = counts[name]
  if not seen then
    local read = call('HMGET', COUNTS, 'c:' .. name, 'u:' .. name, 'r:' .. name)
    seen = { tonumber(read[1]), tonumber(read[2] or 0), tonumber(read[3] or 0), false, false }
    counts[name] = seen
  end
  if permits then
    seen[2], seen[3], seen[4], seen[5] = seen[2] + permits, seen[3] + requests, true, seen[5] or permits < 0
  end
  return seen
end

-- Where a process stands in the line of a semaphore: the beginning of its member, its field, its place, alive until.
local function find(name, process)
  local line = #name .. ':' .. name .. ':'
  local field = 'w:' .. line .. process
  return line, field, string.match(call('HGET', COUNTS, field) or '', '^(%d+) (%d+)$')
end

local function leave(name, process)
  local line, field, place = find(name, process)
  if place then
    call('ZREM', QUEUE, line .. place .. ':' .. process)
    call('HDEL', COUNTS, field)
  end
end

-- Joins a line, or moves forward in it.
local function stand(name, process, place)
  local line, field, own = find(name, process)
  if own and own > place then
    call('ZREM', QUEUE, line .. own .. ':' .. process)
  else
    place = own or place
  end
  call('ZADD', QUEUE, 0, line .. place .. ':' .. process)
  call('HSET', COUNTS, field, string.format('%s %.0f', place, now + PATIENCE))
end

-- The process that is first in line, and its place.
local function first(name)
  local from = #name .. ':' .. name
  while true do
    local member = call('ZRANGEBYLEX', QUEUE, '[' .. from .. ':', '(' .. from .. ';', 'LIMIT', 0, 1)[1]
    if not member then
      return nil
    end
    local process = string.sub(member, #from + 19) -- after two colons and 16 digits
    local _, field, place, alive = find(name, process)
    if alive and tonumber(alive) > now and tonumber(alive) <= now + PATIENCE then -- further ahead: the clock was set back
      return process, place
    end
    call('ZREM', QUEUE, member)
    call('HDEL', COUNTS, field)
  end
end

local function free(id, record)
  if call('ZREM', HELD, id) == 0 then
    return false
  end
  for at = PERMITS, #record, 2 do
    count(record[at], -record[at + 1], -1)
  end
  if record[KEPT] == 1 then
    call('ZADD', RELEASED, now, id)
  else
    call('HDEL', REQUESTS, id)
  end
  return true
end

-- Writes the counts that have changed, and tells the process that is first in line for what was freed.
local function save(fence)
  local write = fence and { 'HSET', COUNTS, 'fence', fence } or { 'HSET', COUNTS }
  for name, seen in pairs(counts) do
    if seen[4] then
      local at = #write
      write[at + 1], write[at + 2], write[at + 3], write[at + 4] = 'u:' .. name, seen[2], 'r:' .. name, seen[3]
      if at > 4000 then -- unpack ends at 8,000
        call(unpack(write))
        write = { 'HSET', COUNTS }
      end
    end
    if seen[5] and (seen[1] or 0) > seen[2] and call('ZCARD', QUEUE) > 1 then
      local process = first(name)
      if process then -- a user without the right to publish: waiting processes poll
        redis.pcall('PUBLISH', string.sub(COUNTS, 1, -7) .. 'turn:' .. process, seen[1] - seen[2] .. '@@' .. name)
      end
    end
  end
  if #write > 2 then
    call(unpack(write))
  end
end
