-- Takes the mutex if it is free and nobody comes before us, or adopts what already is in our name.
--
-- ARGV  1 id  2 ttl + transition in ms  3 transition in ms  4 claim time in ms
--       5 'queue' or 'try': whether to wait in the queue if refused
--       6 the place once had in the queue (a score), or ''
--       7 who told us that it released the mutex, or ''
--       8 until when we wait for the reply, in ms of this server's time; 0 if we do not know that yet
-- Result  {1, now, fence}, or sight(0, ...) and the place in the queue ('' for none), or {2, now}
--
-- One round trip, won or lost. A request that comes so late that nobody waits for it any more does
-- nothing: it could only make an owner that does not know it.

local id, total, transition, claim = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local queues, place = ARGV[5] == 'queue', ARGV[6]

if is_too_late(ARGV[8]) then
  return { 2, now }
end

local reserved, left = reservation()
if reserved and reserved == ARGV[7] then
  -- A Simba peer that we had told: it took the mutex, which leaves no trace here, and released it.
  reserved = nil
end
local granted, waits = owner == id, true
if not owner then
  if reserved then
    granted = reserved == id
  else
    -- A lease ran out, a reservation was not claimed, or a Simba peer released: the order of the
    -- queue holds all the same, and whoever passes by first sees to it. One that a Simba peer has
    -- woken was taken out of the queue by it: it stands where it stood.
    if queues and place ~= '' then
      redis.call('ZADD', queue, 'NX', place, id)
    end
    reserved = hand_on(id, known[2] and known[2] ~= '' and known[2] or id, claim)
    granted, left, waits = not reserved, claim, false
  end
end

if granted then
  local fence = math.max((tonumber(known[1]) or 0) + 1, time[1] * 1000000 + time[2])
  redis.call('PUBLISH', mutex, 'acquired@@' .. id)
  if waits then
    redis.call('ZREM', queue, id)
  end
  if owner then
    -- Adopted: never to an earlier end.
    total = math.max(total, redis.call('PTTL', mutex))
  end
  redis.call('SET', mutex, id, 'PX', total)
  redis.call('HSET', lease, 'fence', string.format('%.0f', fence), 'owner', id,
    'acquired', string.format('%.0f', now), 'transition', transition, 'reserved', '')
  redis.call('PEXPIRE', lease, total + MEMORY)
  return { 1, now, fence }
end

if owner then
  left = redis.call('PTTL', mutex)
  if reserved then
    -- A Simba peer, which knows no reservations, came first: it is void.
    redis.call('HSET', lease, 'reserved', '')
  end
end
if queues then
  if place == '' then
    -- Simba's whole seconds and ours sort together.
    place = string.format('%s.%06d', time[1], time[2])
  end
  redis.call('ZADD', queue, 'NX', place, id)
  -- Whoever lives looks again when this lease ends at the latest; a queue of the dead goes away.
  local keep = math.max(left, total) + 60000
  if redis.call('PTTL', queue) < keep then
    redis.call('PEXPIRE', queue, keep)
  end
end
local result = sight(0, left)
result[8] = place
return result
