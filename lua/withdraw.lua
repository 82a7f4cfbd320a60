-- Leaves the queue, and passes on a mutex that was handed to us. A free mutex is handed on, too: we may
-- have been told of it in the moment in which we left.
--
-- KEYS   1 mutex   2 token   3 queue
-- ARGV   1 id   2 claim time in ms   3 '1' if PUBLISH counts every receiver (no cluster)
--        4 not after: ms of this server's clock, 0 if we do not know it. A late withdrawal must not take
--          us out of a queue that we have joined again
-- Result {1, now in µs} done, {0, now} too late, nothing was done
local call = redis.call
local mutex, token, queue = KEYS[1], KEYS[2], KEYS[3]
local id, claim, counts_all = ARGV[1], ARGV[2], ARGV[3]

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
if ARGV[4] ~= '0' and now > ARGV[4] * 1000 then
  return { 0, now }
end
call('ZREM', queue, id)
local seen = call('MGET', mutex, token)
local ours = seen[1] == id and seen[2] == '0'
if seen[1] and not ours then
  return { 1, now }
end
--@hand_over
local next = hand_over(call('ZPOPMIN', queue), id)
if next == false or (ours and not next) then
  call('PUBLISH', mutex, 'released@@' .. id)
  call('DEL', mutex, token)
end
return { 1, now }
