-- What was written since a version; all there is when it is not of this store's past.
-- KEYS: version
-- ARGV: version that is known

keep_policy()
local version = redis.call('GET', KEYS[1]) or ''
local since = string.match(ARGV[1], '^%d+')
local records = {}
if since and redis.call('HGET', P .. ':versions', since) == ARGV[1] then
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', P .. ':changes', '(' .. since, '+inf')) do
    records[#records + 1] = name
    records[#records + 1] = redis.call('HGET', P .. ':subjects', name)
  end
  return {version, 'since', records}
end
return {version, 'whole', redis.call('HGETALL', P .. ':subjects')}
