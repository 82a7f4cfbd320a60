-- Sets the lease anew for the owner that names its fence. Creates none.
--
-- KEYS   1 mutex   2 token   3 last fence: all of them exist while one of ours owns, so that a slot of a
--        cluster that is on its way answers
-- ARGV   1 id   2 ttl + transition in ms   3 how long the last fence is kept, in ms, or ''   4 fence
-- Result {1, now in µs}, or {0, now, owner or '', its fence, ms left}
--
-- Invariant: the last fence outlives the lease, however often that is renewed.
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local seen = call('MGET', KEYS[1], KEYS[2])
if seen[1] ~= ARGV[1] or seen[2] ~= ARGV[4] then
  return { 0, now, seen[1] or '', seen[2] or '', call('PTTL', KEYS[1]) }
end
call('PEXPIRE', KEYS[2], ARGV[2]) -- the token first, as in acquire.lua
call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[3] ~= '' and call('PEXPIRE', KEYS[3], ARGV[3]) == 0 then
  call('PSETEX', KEYS[3], ARGV[3], ARGV[4])
end
return { 1, now }
