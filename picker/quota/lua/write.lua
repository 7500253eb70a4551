-- Write records with their audit entries, all or none.
-- KEYS: version
-- ARGV: tag of the new version, [[name, expected revision, record or ""], ...], [entry, ...]

local version = redis.call('GET', KEYS[1]) or '0-'
local revision = tonumber(string.match(version, '^%d+')) + 1
local changes, entries = cmsgpack.unpack(ARGV[2]), cmsgpack.unpack(ARGV[3])
for _, change in ipairs(changes) do
  local record = redis.call('HGET', P .. ':subjects', change[1]) or '0:'
  local found, text = string.match(record, '^(%d+):(.*)$')
  found = text ~= '' and tonumber(found) or 0
  if found ~= change[2] then
    return cmsgpack.pack({'conflict', change[1], change[2], found})
  end
end
for _, change in ipairs(changes) do
  redis.call('HSET', P .. ':subjects', change[1], revision .. ':' .. change[3])
  redis.call('ZADD', P .. ':changes', revision, change[1])
end
version = revision .. '-' .. ARGV[1]
redis.call('SET', KEYS[1], version)
redis.call('HSET', P .. ':versions', revision, version)
redis.call('HDEL', P .. ':versions', revision - 1000)
enter(entries, revision)
keep_policy()
return cmsgpack.pack({'written', version})
