-- Reads who owns the mutex. Writes nothing.
--
-- KEYS   1 mutex   2 token
-- Result {0, now in µs, owner or '', its fence ('0': handed over, '': none), ms left}
local seen = redis.call('MGET', KEYS[1], KEYS[2])
local time = redis.call('TIME')
return { 0, time[1] * 1000000 + time[2], seen[1] or '', seen[2] or '', redis.call('PTTL', KEYS[1]) }
