-- Takes the mutex if it is free and no contender comes before us, or adopts what stands in our name: a
-- hand-over, or the rest of an attempt whose reply was lost. Refused, it joins the queue if asked to.
--
-- KEYS   1 {prefix}:{mutex}            the owner's id; expires with the lease       (Simba)
--        2 {prefix}:{mutex}:token      the fence of this ownership, '0': handed over (Simba 4)
--        3 {prefix}:{mutex}:fence      the last fence                               (Simba 4)
--        4 {prefix}:{mutex}:contender  who waits, by seconds of this server's clock (Simba up to 3.1)
-- ARGV   1 id   2 ttl + transition in ms   3 claim time in ms
--        4 how long the last fence is kept, in ms, or '' for ever
--        5 '1' if PUBLISH counts every receiver (no cluster)
--        6 '' do not queue, '0' queue, or the place in the queue that we had before
--        7 not after: ms of this server's clock, 0 if we do not know that clock yet
-- Result {fence, now in µs}                                                  granted
--        {0, now, owner, its fence, ms left, place}                          refused
--          fence '0': handed over, '': none (Simba before 4); left -1: no end; left 0: look again at once
--        {-1, now}                                                           too late, nothing was done
--
-- Invariants: a grant raises the fence above the last one, above the token and to this server's µs;
-- writes token before mutex, so that the token never outlives it; and leaves the id in no queue. Lua
-- prints numbers with 14 digits, hence the format.
local call = redis.call
local mutex, token, queue = KEYS[1], KEYS[2], KEYS[4]
local id, total = ARGV[1], ARGV[2]

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
if ARGV[7] ~= '0' and now > ARGV[7] * 1000 then
  return { -1, now }
end

local seen = call('MGET', mutex, token, KEYS[3])
local owner, term = seen[1], seen[2]
local left = 0
if owner and owner ~= id then
  left = call('PTTL', mutex)
  local claim = tonumber(ARGV[3])
  if term == '0' and left > claim and call('PTTL', token) > claim then
    -- The clock was set back: no hand-over lies further ahead than the claim time. Both keys, because a token
    -- that outlived its mutex (an operator's DEL, a migration) says nothing about the owner after it.
    owner = nil
  end
end
if not owner and call('EXISTS', queue) == 1 then
  local claim, counts_all = ARGV[3], ARGV[5]
  if #ARGV[6] > 1 then
    call('ZADD', queue, 'NX', ARGV[6], id) -- a Simba contender may have taken us out
  end
  --@hand_over
  local simba
  owner, simba = hand_over(call('ZPOPMIN', queue), id)
  if owner then
    term, left = '0', tonumber(claim)
    if simba then
      owner = ''
    end
  elseif owner == false then
    owner, term, left = '', '0', 0
  end
end

if not owner or owner == id then
  local fence = now
  -- What is no number, or none that Lua holds exactly, is no fence: it must not stay.
  local last, own = tonumber(seen[3] or 0), tonumber(term or 0)
  if last and last >= fence and last < 9007199254740991 then
    fence = last + 1
  end
  if own and own >= fence and own < 9007199254740991 then
    fence = own + 1
  end
  -- As a rule it is the time as it came; the format takes a microsecond.
  local text = fence == now and #time[2] == 6 and time[1] .. time[2] or string.format('%.0f', fence)
  if owner and term ~= '0' then
    total = math.max(total, call('PTTL', mutex)) -- adopted: never to an earlier end
  end
  call('PUBLISH', mutex, 'acquired@@' .. id) -- first: an ACL that denies it leaves everything as it was
  call('PSETEX', token, total, text)
  call('PSETEX', mutex, total, id)
  if ARGV[4] == '' then
    call('SET', KEYS[3], text)
  else
    call('PSETEX', KEYS[3], ARGV[4], text)
  end
  return { fence, now }
end

local place = ARGV[6]
if place ~= '' then
  if place == '0' then
    -- Sorts with Simba's whole seconds, and never is whole.
    place = string.format('%s.%06d', time[1], math.max(time[2], 1))
  end
  call('ZADD', queue, 'NX', place, id)
  -- A live waiter looks again when this lease ends; a queue of the dead goes away.
  call('PEXPIRE', queue, math.max(left, total) + 60000)
end
return { 0, now, owner, term or '', left, place }
