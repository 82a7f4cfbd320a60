-- Reads the names of the mutexes that have an owner or a waiter.
SELECT mutex
FROM {table}
WHERE waiters <> '' OR (owner_id <> '' AND transition_at >= {clock})
ORDER BY mutex
