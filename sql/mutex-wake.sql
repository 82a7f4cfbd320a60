-- Wakes the process that has a token: ends the statement of the connection that holds its name.
--
-- In:     {token}, 18 digits. Sent as text: MySQL takes no parameter in a prepared KILL.
-- Out:    error 1094: nobody holds that name, the process is dead. 1095: it is another account's.
-- Keeps:  nothing but that wait: no other statement runs on a connection that holds such a name.
KILL QUERY IS_USED_LOCK('contend:{token}')
