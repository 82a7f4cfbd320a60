-- Leaves the queue, and passes on a mutex that was handed to us. A free mutex is handed on, too: we may
-- have been told of it in the moment in which we left.
--
-- KEYS   1 mutex   2 token   3 queue
-- ARGV   1 id   2 claim time in ms   3 '1' if PUBLISH counts every receiver (no cluster)
-- Result 1
--
-- Invariant: an ownership is never touched, not even our own. A withdrawal that comes late costs a place in the
-- queue that was taken since, never a lease.
local call = redis.call
local mutex, token, queue = KEYS[1], KEYS[2], KEYS[3]
local id, claim, counts_all = ARGV[1], ARGV[2], ARGV[3]

call('ZREM', queue, id)
local seen = call('MGET', mutex, token)
local ours = seen[1] == id and seen[2] == '0'
if seen[1] and not ours then
  return 1
end
--@hand_over
local next = hand_over(call('ZPOPMIN', queue), id)
if next == false or (ours and not next) then
  call('PUBLISH', mutex, 'released@@' .. id)
  call('DEL', mutex, token)
end
return 1
