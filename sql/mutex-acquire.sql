-- Makes a contender the owner of a free mutex, or of one that is its own already.
--
-- In:     :mutex, :id, :ttl and :total (milliseconds); with {politely}, also :wake_name and
--         :queue_name.
-- Out:    1 row matched: acquired, and the fence is the OK packet's last insert id, so that the winner
--         reads nothing. 0 rows: somebody else owns it, or there is no such row.
-- Keeps:  the fence grows, to the server's clock at least ({fence_now}: microseconds, or seconds where
--         the column is an INT); no end moves backwards (a delayed ghost of our own may come last, with
--         the NOW() of its start).
--
-- Free is what Simba calls free, transition_at < now: at equality the owner still has it. Simba lets
-- the owner renew only while transition_at > now, so that at equality nobody can; here the owner
-- always may, which leaves no gap and contradicts no peer.
--
-- {politely} leaves a released mutex to the waiter that was woken for it (it holds the wake name), or
-- that is the first of those who wait (it holds the queue's name); one that ran out is anybody's.
UPDATE {table}
SET version       = LAST_INSERT_ID(GREATEST(version + 1, {fence_now})),
    acquired_at   = {now},
    ttl_at        = GREATEST(ttl_at, {now} + :ttl),
    transition_at = GREATEST(transition_at, {now} + :total),
    owner_id      = :id
WHERE {mutex_is}
  AND ({owner_is} OR (transition_at < {now} {politely}))
