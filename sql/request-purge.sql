-- Deletes released requests and their permits.
--
-- In:     {ids}.
-- Out:    what the second statement matched: requests that were still there.

DELETE FROM {permit} WHERE permit_request_id IN ({ids}) AND state = 'RELEASED';
DELETE FROM {request} WHERE id IN ({ids}) AND state = 'RELEASED'
