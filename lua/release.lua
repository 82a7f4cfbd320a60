-- Ends the lease of the owner that names its fence, and hands the mutex to the next waiter.
--
-- KEYS   1 mutex   2 token   3 queue; or 1 and 2 alone, in a slot that is on its way: frees it
-- ARGV   1 id   2 claim time in ms   3 '1' if PUBLISH counts every receiver (no cluster)
--        4 '1' in a mixed fleet: every 8th release is left to those that do not queue
--        5 fence, '' for an owner that has none
-- Result 1 done, 0 there is no such ownership (any more): nothing was done
--
-- Invariant: afterwards the mutex is handed over to one waiter, which was told, or it is free and all were told.
-- Never both: then all would try in vain.
local call = redis.call
local mutex, token, queue = KEYS[1], KEYS[2], KEYS[3]
local id, fence = ARGV[1], ARGV[5]

local seen = call('MGET', mutex, token)
if seen[1] ~= id or (seen[2] or '') ~= fence then
  return 0
end
local from, next = id, nil
if ARGV[4] == '1' and fence ~= '' and fence % 8 == 0 then
  -- Simba 3.2 and later do not queue, and would find nothing while ours wait. Ours wait a moment.
  from = '!'
elseif queue then
  local head = call('ZPOPMIN', queue)
  if head[1] then
    local claim, counts_all = ARGV[2], ARGV[3]
    --@hand_over
    next = hand_over(head, id)
  end
end
if not next then
  call('PUBLISH', mutex, 'released@@' .. from)
  call('DEL', mutex, token)
end
return 1
