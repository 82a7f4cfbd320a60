-- Deletes requests that were released long ago, or old changes of capacities.
--
-- ARGV   1 'requests' or 'history'   2 how old they are at least, in ms   3 at most so many
-- Result { how many, now }
-- Invariant: what is held stays.
if PART == 'purge' then
  local before, old = now - ARGV[2] * 1000
  if ARGV[1] == 'requests' then
    old = call('ZRANGEBYSCORE', RELEASED, '-inf', before, 'LIMIT', 0, ARGV[3])
  else
    old = call('XRANGE', HISTORY, '-', string.format('%.0f', math.max(math.floor(before / 1000), 0)), 'COUNT', ARGV[3])
    for at, entry in ipairs(old) do
      old[at] = entry[1]
    end
  end
  for at = 1, #old, 1000 do -- unpack ends at 8,000
    local to = math.min(at + 999, #old)
    if ARGV[1] == 'requests' then
      call('HDEL', REQUESTS, unpack(old, at, to))
      call('ZREM', RELEASED, unpack(old, at, to))
    else
      call('XDEL', HISTORY, unpack(old, at, to))
    end
  end
  return { #old, now }
end
