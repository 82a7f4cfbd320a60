-- Inserted into acquire.lua, release.lua and withdraw.lua where they say so, and only there: a function
-- that is not needed is not made. Hands a free mutex to the contender that waits longest.
--
-- Uses   call, mutex, token, queue, id, claim, and counts_all: '1' if PUBLISH counts every receiver (not
--        in a cluster, where it counts those of one node)
-- head   what ZPOPMIN took out of the queue; from: who released
-- Result nil: no contender waits, or none before `id`; nothing was written
--        the id that was told, and whether it is a Simba contender (a whole score, up to 3.1)
--        false: 16 were looked at, and all are dead; there may be more
--
-- Invariant: the id in the mutex key stands in no queue, a subscriber listens for it, and
-- token '0' says that nothing was granted yet. A Simba contender gets what Simba gives it: the key is
-- deleted and it is told. Written into the key, it would own, and queue anew while it does.
local function hand_over(head, from)
  for tries = 1, 16 do
    if tries > 1 then
      head = call('ZPOPMIN', queue)
    end
    local next = head[1]
    if not next or next == id then
      return nil
    end
    local simba = head[2] % 1 == 0
    if call('PUBLISH', mutex .. ':' .. next, 'released@@' .. from) > 0 or (simba and counts_all ~= '1') then
      if simba then
        call('DEL', mutex, token)
      else
        call('PSETEX', token, claim, '0')
        call('PSETEX', mutex, claim, next)
      end
      -- For those who still wait: the next one may not come for it. In a slot that is on its way, a key that has just
      -- become empty cannot be asked for.
      if redis.pcall('EXISTS', queue) ~= 0 then
        call('PUBLISH', mutex .. '!handed', claim .. '@@' .. next)
      end
      return next, simba
    end
  end
  return false
end
