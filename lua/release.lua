-- Ends the lease of the owner that names its fence and hands the mutex on. With an empty fence, the
-- contender withdraws instead: it leaves the queue and passes on what was reserved for it.
--
-- ARGV  1 id  2 claim time in ms  3 fence, or ''
--       4 until when we wait for the reply (see acquire.lua): a late withdrawal must not take us out
--         of a queue that we have entered again. A late release is harmless, it names its fence.
-- Result  1 if the lease was ended or the contender withdrew, 0 if not

local id, claim, fence = ARGV[1], tonumber(ARGV[2]), ARGV[3]

if fence == '' then
  if is_too_late(ARGV[4]) then
    return 0
  end
  redis.call('ZREM', queue, id)
  local reserved = reservation()
  if not owner and (not reserved or reserved == id) then
    if reserved then
      redis.call('HSET', lease, 'reserved', '')
    end
    hand_on(nil, id, claim)
  end
  return 1
end

if owner ~= id or known[2] ~= id or known[1] ~= fence then
  return 0
end
-- First, so that an ACL that denies it leaves everything as it was.
redis.call('PUBLISH', mutex .. '!released', id)
redis.call('DEL', mutex)
redis.call('HSET', lease, 'owner', '', 'reserved', '')
redis.call('ZREM', queue, id)
hand_on(nil, id, claim)
return 1
