-- Uses an external id up, so that an acquire whose outcome nobody knows cannot commit any more.
--
-- In:     {external_id}, {owner}.
-- Out:    error 1062 where the id is taken: then the outcome is known.
INSERT INTO permit_request (external_id, owner, state)
VALUES ({external_id}, {owner}, 'RELEASED')
