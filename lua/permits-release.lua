-- Gives back what one grant holds, or whatever is held under an id.
--
-- ARGV   1 external id   2 token, or '' for any grant
-- Result { 1, now, name, count, ... } released; { 0, now } not held, or by another grant; { -1, now } no such request
-- Invariant: a released request is held no more. Its record stays if the id is a caller's, and tells that it is used up.
if PART == 'release' then
  local id = ARGV[1]
  local record = read(id)
  if not record then
    return { -1, now }
  elseif ARGV[2] ~= '' and ARGV[2] ~= record[TOKEN] or not free(id, record) then
    return { 0, now }
  end
  save()
  return { 1, now, unpack(record, PERMITS) }
end
