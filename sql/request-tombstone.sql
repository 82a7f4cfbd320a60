-- Uses an external id up, so that a call of unknown outcome cannot be granted any more.
--
-- In:     {external_id}, {token}.
-- Out:    duplicate key: somebody was faster, perhaps that call.

INSERT INTO {request} (external_id, token, state)
VALUES ({external_id}, {token}, 'RELEASED')
