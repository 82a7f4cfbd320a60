-- Changes the counter of a semaphore that this transaction has locked.
--
-- In:     {change}, {id}.

UPDATE {semaphore} SET used = used + {change} WHERE id = {id}
