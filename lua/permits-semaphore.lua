-- Makes or deletes a semaphore, or sets its capacity and records the change.
--
-- ARGV   1 'create', 'set' or 'delete'   2 name   3 capacity   4 who changes it, or ''
-- Result create: { 1, now }, or { 0, now } if it is there; it is not changed
--        set:    { 1, now, capacity before }, or { -1, now }
--        delete: { 1, now }, { 0, now, capacity, held } while it is held, or { -1, now }
-- Invariant: a semaphore of which permits are held is not deleted. A capacity never changes without an entry in the history.
if PART == 'semaphore' then
  local name = ARGV[2]
  if ARGV[1] == 'create' then
    call('HSETNX', REQUESTS, '', '[]')
    call('ZADD', HELD, 'NX', '+inf', '')
    call('ZADD', RELEASED, 'NX', '+inf', '')
    call('ZADD', QUEUE, 'NX', 0, '')
    if call('EXISTS', HISTORY) == 0 then
      call('XADD', HISTORY, 'MAXLEN', 0, '*', 'name', '') -- leaves an empty stream
    end
    return { call('HSETNX', COUNTS, 'c:' .. name, ARGV[3]), now }
  end
  local seen = count(name)
  local capacity = seen[1]
  if not capacity then
    return { -1, now }
  elseif ARGV[1] == 'set' then
    if capacity ~= tonumber(ARGV[3]) then
      call('HSET', COUNTS, 'c:' .. name, ARGV[3])
      call('XADD', HISTORY, '*', 'name', name, 'by', ARGV[4], 'from', capacity, 'to', ARGV[3])
      seen[1], seen[5] = tonumber(ARGV[3]), true
      save()
    end
    return { 1, now, capacity }
  elseif seen[2] ~= 0 or seen[3] ~= 0 then
    return { 0, now, capacity, seen[2] }
  end
  call('HDEL', COUNTS, 'c:' .. name, 'u:' .. name, 'r:' .. name)
  return { 1, now }
end
