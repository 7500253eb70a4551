-- What was written since a version; all there is when it is not of this store's past.
-- KEYS: version
-- ARGV: version that is known, revision and name that the page before ended with (or empty), how
--       many at most

keep_policy()
local version = redis.call('GET', KEYS[1]) or ''
local changes = P .. ':changes' -- names by the revision of their last change, then by themselves
local since = string.match(ARGV[1], '^%d+')
local whole = not since or redis.call('HGET', P .. ':versions', since) ~= ARGV[1]
local first = 0
if ARGV[2] ~= '' then
  if redis.call('ZSCORE', changes, ARGV[3]) == ARGV[2] then
    first = redis.call('ZRANK', changes, ARGV[3]) + 1
  else -- it was changed since, and stands further on: take all of its revision again
    first = redis.call('ZCOUNT', changes, '-inf', '(' .. ARGV[2])
  end
elseif not whole then
  first = redis.call('ZCOUNT', changes, '-inf', since)
end
local names = redis.call('ZRANGE', changes, first, first + tonumber(ARGV[4]) - 1)
local records, last = {}, ''
if #names > 0 then
  records = redis.call('HMGET', P .. ':subjects', unpack(names))
  last = redis.call('ZSCORE', changes, names[#names])
end
return {version, whole and 'whole' or 'since', names, records, last}
