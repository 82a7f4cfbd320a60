-- Lets the ttl of grants begin anew.
--
-- ARGV   external id, token or '' for any grant; ...
-- Result { 1, now, for each: 1 renewed, 0 not held or by another grant, -1 no such request }
-- Invariant: no grant ends earlier than before, and none that was taken back is held again.
if PART == 'renew' then
  call('PERSIST', HELD) -- changes nothing; but a script that has written is not refused where memory is full
  local answer = { 1, now }
  for at = 1, #ARGV, 2 do
    local id, token = ARGV[at], ARGV[at + 1]
    local record, renewed = read(id), -1
    if record then
      renewed = 0
      if (token == '' or token == record[TOKEN]) and call('ZSCORE', HELD, id) then
        call('ZADD', HELD, 'XX', 'GT', reclaim_at(record[TTL]), id)
        renewed = 1
      end
    end
    answer[#answer + 1] = renewed
  end
  return answer
end
