-- Takes permits back, page by page: repeat with the cursor until it is '0'.
--
-- ARGV   1 'expired': whose end plus a quarter of the ttl has passed
--          'stale':   last renewed 2 µs ago or earlier, unless the ttl or the quarter after it still runs
--          'owner':   of the owner 3, last renewed at 2, µs of this server's clock, or earlier
--        4 cursor
-- Result { cursor, now, record, ... }: what was taken back
-- Invariant: a request is judged by its state at this moment; one that was renewed since the caller looked is left alone.
if PART == 'sweep' then
  local what, since = ARGV[1], tonumber(ARGV[2])
  if what == 'stale' then
    since = now - since
  end
  local page = call('ZSCAN', HELD, ARGV[4], 'COUNT', 250)
  local answer = { page[1], now }
  for at = 1, #page[2], 2 do
    local id, score = page[2][at], tonumber(page[2][at + 1])
    if id ~= '' and (what == 'owner' or score <= now or what == 'stale' and score >= NEVER) then
      local record = read(id) or { '', '0', 0, 0, 0, '' }
      local ttl = record[TTL]
      local idle = score - (ttl > 0 and ttl * 1250 or NEVER) <= since
      if (what == 'expired' or idle and (what == 'stale' or record[OWNER] == ARGV[3])) and free(id, record) then
        answer[#answer + 1] = reply(1, id, record)
      end
    end
  end
  save()
  return answer
end
