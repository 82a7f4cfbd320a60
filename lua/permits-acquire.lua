-- Takes all permits or none, finds the grant of an earlier try, or takes a held request over. A process that waits stands
-- in the line of the semaphore that it was found short of. It takes nothing of a semaphore while another process has waited
-- there for longer. It keeps its place when it moves to another line, so the one that came first is never held up by others.
--
-- ARGV   1 external id   2 token   3 owner or ''   4 ttl in ms or 0   5 '1': take over   6 '1': keep the record after its
--        release, '0': the id is not used again   7.. name, count, sorted by name; then process, '' if it does not wait; the
--        name of the line in which this request stands, or ''; '1' if other requests of the process stand there; not after:
--        ms of this server's clock, 0 if the caller does not know that clock
-- Result { code, now in µs, { external ids of what had expired and was taken back }, ... }; then, by code,
--        1    fence, ms left or -1, { free permits of each name }: granted
--        2    the record: known, held by another token or released
--        0    name, capacity, held, wanted: exhausted, or another process comes first
--        3    exhausted, but there is more to take back: repeat at once
--        -1   too late
--        -2   name: no such semaphore
--        -3   the record: conflict
--
-- Invariant: of no semaphore is more held than its capacity by what this grants. The fence is above every earlier one, and at
-- least the server's time. What has a ttl is taken back no sooner than a quarter of it after its end.
if PART == 'acquire' then
  local id, token, owner, ttl, last = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), #ARGV - 4
  local process, line, more = ARGV[last + 1], ARGV[last + 2], ARGV[last + 3] == '1'
  if ARGV[#ARGV] ~= '0' and now > ARGV[#ARGV] * 1000 then
    return { -1, now, {} }
  end
  local taken = {}

  -- Takes back what has expired, at most `most`. Returns how many.
  local function reclaim(most)
    local expired = call('ZRANGEBYSCORE', HELD, '-inf', now, 'LIMIT', 0, most)
    for _, id in ipairs(expired) do
      free(id, read(id) or {})
      taken[#taken + 1] = id
    end
    return #expired
  end

  -- The first semaphore that has too little, or for which another process has waited since before `place`.
  local function refusal(place)
    local short
    for at = 7, last, 2 do
      local seen, wanted, other, since = count(ARGV[at]), tonumber(ARGV[at + 1])
      if place then
        other, since = first(ARGV[at])
      end
      if not seen[1] then
        return { -2, now, taken, ARGV[at] }
      elseif not short and (seen[2] + wanted > seen[1] or other and other ~= process and since < place) then
        short = { 0, now, taken, ARGV[at], seen[1], seen[2], wanted }
      end
    end
    return short
  end

  local function granted(fence, left)
    local room = {}
    for at = 7, last, 2 do
      local seen = count(ARGV[at])
      room[#room + 1] = math.max((seen[1] or 0) - seen[2], 0)
    end
    return { 1, now, taken, fence, left, room }
  end

  local record = read(id)
  if record then
    local score = tonumber(call('ZSCORE', HELD, id))
    local function known(code)
      local answer = reply(code, id, record, score)
      table.insert(answer, 3, taken)
      return answer
    end
    local same = #record == last and record[OWNER] == owner
    for at = PERMITS, #record, 2 do
      same = same and record[at] == ARGV[at] and record[at + 1] == tonumber(ARGV[at + 1])
    end
    if not score then
      return known(2)
    elseif not same then
      return known(-3)
    elseif record[TOKEN] == token then
      return granted(tonumber(record[FENCE]), ms_left(record, score))
    elseif ARGV[5] ~= '1' then
      return known(2)
    end
  else
    local why, rounds = refusal(), 0
    while why and why[1] == 0 and rounds < 5 and reclaim(100) > 0 do
      why, rounds = refusal(), rounds + 1
    end
    if why and why[1] == 0 and rounds == 5 then
      save()
      return { 3, now, taken }
    end
    if process ~= '' then
      local fresh = string.format('%.0f', now)
      local place = line ~= '' and select(3, find(line, process)) or fresh
      why = why or refusal(place)
      -- Where it wants more than the capacity, it would keep the others waiting for good.
      local short = why and why[1] == 0 and why[7] <= why[5] and why[4]
      if line ~= '' and line ~= short then
        leave(line, process)
        count(line)[5] = true -- the next process hears of what is free
        if more then
          stand(line, process, fresh)
        end
      end
      if short then
        stand(short, process, place)
      end
    end
    if why then
      save()
      return why
    end
    for at = 7, last, 2 do
      count(ARGV[at], tonumber(ARGV[at + 1]), 1)
    end
  end

  local fence, former = now, tonumber(call('HGET', COUNTS, 'fence'))
  if former and former >= fence and former < 9007199254740991 then
    fence = former + 1
  end
  local created = record and record[CREATED] or math.floor(now / 1000)
  record = { token, string.format('%.0f', fence), ttl, created, tonumber(ARGV[6]), owner }
  for at = 7, last, 2 do
    record[at], record[at + 1] = ARGV[at], tonumber(ARGV[at + 1])
  end
  call('HSET', REQUESTS, id, cjson.encode(record))
  call('ZADD', HELD, reclaim_at(ttl), id)
  save(fence)
  return granted(fence, ttl > 0 and ttl or -1)
end
