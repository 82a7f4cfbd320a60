-- Records that a run of the mutex's schedule is now, for the owner that names its fence; or reads when
-- the last one was.
--
-- KEYS   1 {prefix}:{mutex}:run   when the last run was, in ms of this server's clock
--        2 token                  the fence of the present owner; to record only
-- ARGV   1 fence   2 how long to keep it, in ms
-- Result to record: 1 done, 0 there is no such ownership; to read: its age in ms, -1 if there is none
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if #KEYS == 1 then
  local at = redis.call('GET', KEYS[1])
  return at and math.max(now - at, 0) or -1
end
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
redis.call('PSETEX', KEYS[1], ARGV[2], string.format('%.0f', now))
return 1
