-- Leaves the line of a semaphore, and tells the next process if something is free.
--
-- ARGV   1 name   2 process
-- Result { 1, now }
-- Invariant: the other processes keep their places.
if PART == 'leave' then
  leave(ARGV[1], ARGV[2])
  count(ARGV[1])[5] = true
  save()
  return { 1, now }
end
