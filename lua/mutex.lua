-- The head of acquire.lua, renew.lua and release.lua: what they all read, and how a free mutex is
-- handed on. The crate sends it and one of the three as one script.
--
-- KEYS  1  {prefix}:{mutex}            the owner's id; expires with the lease (as in Simba)
--       2  {prefix}:{mutex}:contender  who waits, by the server's time of arrival (as in Simba)
--       3  {prefix}:{mutex}:lease      ours: the last fence and whose it is, and the reservation
-- Channels  KEYS[1]                    acquired@@ID, to everybody (as in Simba)
--           KEYS[1]:ID                 released@@ID, to the contender that comes next (as in Simba)
--           KEYS[1]!next:ID            ours: "you come after that one", with its claim time in ms
--           KEYS[1]!released           ours: to observers
-- No name contains a brace, so nothing of ours can be the key or channel of another mutex or id.
--
-- Invariants: a fence never shrinks; the owner of a fence is written beside it, because a Simba peer
-- takes the mutex without one; whoever owns or holds a reservation does not stand in the queue; every
-- key expires. Lua prints numbers with 14 digits: a number of more is always formatted.

local mutex, queue, lease = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local owner = redis.call('GET', mutex)
local known = redis.call('HMGET', lease, 'fence', 'owner', 'acquired', 'transition', 'reserved', 'claim_at')

-- How long fence and reservation are remembered after the lease. After that the server's time in
-- microseconds is the floor, which lies above every earlier fence unless the clock was set back by more.
local MEMORY = 3600000

-- Whether the sender has given up on this request, which then must do nothing.
local function is_too_late(deadline)
  deadline = tonumber(deadline)
  return deadline > 0 and now > deadline
end

-- Whether the mutex is kept for a contender that was told, and for how many milliseconds more.
local function reservation()
  local left = (tonumber(known[6]) or 0) - now
  if known[5] and known[5] ~= '' and left > 0 then
    return known[5], left
  end
  return nil, 0
end

-- Offers the free mutex to the contender that waits longest and that somebody listens for, and keeps
-- it for that one for `claim` ms, so that nobody barges in. Those that nobody listens for are dead and
-- are forgotten. Stops at `me`. Returns whom the mutex is kept for: nil if nobody comes before `me`.
local function hand_on(me, from, claim)
  while true do
    local first = redis.call('ZPOPMIN', queue)[1]
    if not first or first == me then
      return nil
    end
    if redis.call('PUBLISH', mutex .. ':' .. first, 'released@@' .. from) > 0 then
      redis.call('HSET', lease, 'reserved', first, 'claim_at', string.format('%.0f', now + claim))
      redis.call('PEXPIRE', lease, MEMORY)
      -- Should that one die before it claims, the next must not sleep until the end of some lease.
      for _, second in ipairs(redis.call('ZRANGE', queue, 0, 3)) do
        if redis.call('PUBLISH', mutex .. '!next:' .. second, claim) > 0 then
          break
        end
      end
      return first
    end
  end
end

-- Result of acquire and renew: outcome, server time in ms, owner, its fence, when it acquired, its
-- transition in ms (0, 0 and -1 for a peer that writes none), ms until the mutex can change hands.
local function sight(outcome, left)
  if owner and owner == known[2] then
    return { outcome, now, owner, known[1], known[3], known[4], left }
  end
  return { outcome, now, owner or '', 0, 0, -1, left }
end
