-- Compares the counts with the records, and corrects them if asked to. Reads everything that is held at once.
--
-- ARGV   1 '1': correct
-- Result { 1, now, name, permits counted, permits held; ... } where counts and records differ
-- Invariant: after a correction u:NAME and r:NAME are the sums over the records in `held`.
if PART == 'audit' then
  local held, answer, from = {}, { 1, now }, 0
  for _, field in ipairs(call('HKEYS', COUNTS)) do
    if string.find(field, '^[cur]:') then
      held[string.sub(field, 3)] = { 0, 0 }
    end
  end
  repeat
    local ids = call('ZRANGE', HELD, from, from + 999)
    from = from + #ids
    for _, id in ipairs(ids) do
      local record = id ~= '' and read(id) or {}
      for at = PERMITS, #record, 2 do
        local sum = held[record[at]] or { 0, 0 }
        held[record[at]] = { sum[1] + record[at + 1], sum[2] + 1 }
      end
    end
  until #ids < 1000
  for name, sum in pairs(held) do
    local seen = count(name)
    if seen[2] ~= sum[1] or seen[3] ~= sum[2] then
      for _, value in ipairs({ name, seen[2], sum[1] }) do
        answer[#answer + 1] = value
      end
      if ARGV[1] == '1' then
        count(name, sum[1] - seen[2], sum[2] - seen[3])
      end
    end
  end
  save()
  return answer
end
