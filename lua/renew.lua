-- Sets the lease anew for the owner that names its fence, never to an earlier end; creates none.
-- With an empty id it only looks: that is how an observer sees the owner.
--
-- ARGV  1 id, or ''  2 ttl + transition in ms  3 fence
--       4 until when we wait for the reply, of no interest: a late renewal is harmless, it names its fence
-- Result  sight(1, ...) if renewed, sight(0, ...) if not

local id, total, fence = ARGV[1], tonumber(ARGV[2]), ARGV[3]

local left = owner and redis.call('PTTL', mutex) or 0
if not owner or owner ~= id or known[2] ~= id or known[1] ~= fence then
  return sight(0, left)
end
-- Written in any case: a replica, whose word is worth nothing, cannot.
left = math.max(left, total)
redis.call('PEXPIRE', mutex, left)
redis.call('PEXPIRE', lease, left + MEMORY)
return sight(1, left)
