-- Reads. Requests and history come page by page: repeat with the cursor until it is '0'.
--
-- ARGV   1 'status'    2 external id
--        1 'held'      2 name or '' for all   3 cursor
--        1 'usage'     2 name or '' for all
--        1 'history'   2 name   3 cursor
-- Result status:  { 0, now } or a record
--        held:    { cursor, now, record, ... }, or { '', now } without such a semaphore
--        usage:   { 1, now, name, capacity, held, requests, held permits that have expired; ... }; of what has expired it counts
--                 the first 1,000 requests
--        history: { cursor, now, ms, who, capacity before, capacity after; ... }
-- Invariant: writes nothing.
if PART == 'look' then
  local what, name, answer = ARGV[1], ARGV[2], { 1, now }

  local function add(...)
    for _, value in ipairs({ ... }) do
      answer[#answer + 1] = value
    end
  end

  if what == 'status' then
    local record = read(name)
    return record and reply(1, name, record, tonumber(call('ZSCORE', HELD, name))) or { 0, now }
  elseif what == 'held' then
    if name ~= '' and not count(name)[1] then
      return { '', now }
    end
    local page = call('ZSCAN', HELD, ARGV[3], 'COUNT', 250)
    answer[1] = page[1]
    for at = 1, #page[2], 2 do
      local id = page[2][at]
      local record = id ~= '' and read(id) or {}
      local holds = name == '' and #record > 0
      for place = PERMITS, #record, 2 do
        holds = holds or record[place] == name
      end
      if holds then
        add(reply(1, id, record, tonumber(page[2][at + 1])))
      end
    end
    return answer
  elseif what == 'history' then
    local from = ARGV[3] == '0' and '-' or '(' .. ARGV[3]
    local page = call('XRANGE', HISTORY, from, '+', 'COUNT', 500)
    answer[1] = #page == 500 and page[500][1] or '0'
    for _, entry in ipairs(page) do
      local fields = entry[2]
      if fields[2] == name then
        add(string.match(entry[1], '^%d+'), fields[4], fields[6], fields[8])
      end
    end
    return answer
  end
  local expired = {}
  for _, id in ipairs(call('ZRANGEBYSCORE', HELD, '-inf', now, 'LIMIT', 0, 1000)) do
    local record = read(id) or {}
    for at = PERMITS, #record, 2 do
      expired[record[at]] = (expired[record[at]] or 0) + record[at + 1]
    end
  end
  for _, field in ipairs(name == '' and call('HKEYS', COUNTS) or { 'c:' .. name }) do
    local found = string.sub(field, 3)
    local seen = string.sub(field, 1, 2) == 'c:' and count(found)
    if seen and seen[1] then
      add(found, seen[1], seen[2], seen[3], expired[found] or 0)
    end
  end
  return answer
end
