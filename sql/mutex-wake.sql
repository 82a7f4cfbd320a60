-- Wakes a process: ends the statement of the connection that holds its named lock.
--
-- In:     {process}, 12 digits. Sent as text: MySQL takes no parameter in a prepared KILL.
-- Out:    error 1094: no connection holds that lock, the process is dead. 1095: it is another account's.
-- Keeps:  everything but that wait: no statement that matters runs on a connection that holds such a lock.
KILL QUERY IS_USED_LOCK('contend:{process}')
